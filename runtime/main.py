"""The only door from the command line into the runtime.

Invariants: importing this module imports neither torch nor a server; every function takes plain
values and returns plain frozen ones; a package of the `runtime` extra that is not installed is
SD834 with the pip command. Nothing here prints: text goes to the callbacks of the caller.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from runtime.bench.page import report_page
from runtime.bench.raw import RawBench, read_raw, write_raw
from runtime.bench.report import BenchReport, GenerateReport, Identical, Point, bench_json_schema
from runtime.bench.settings import BenchSettings, GenerateOptions
from runtime.bench.summary import summarise
from runtime.disagg.limits import Limits
from runtime.server.role_settings import RoleOptions
from runtime.server.settings import RouteOptions, ServeOptions
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.signals import handled

if TYPE_CHECKING:
    from runtime.config import Overrides

__all__ = [
    "BenchReport",
    "BenchSettings",
    "EngineOptions",
    "GenerateOptions",
    "GenerateReport",
    "Identical",
    "Limits",
    "Point",
    "RawBench",
    "RoleOptions",
    "RouteOptions",
    "ServeOptions",
    "bench",
    "bench_json_schema",
    "doctor_facts",
    "generate",
    "read_raw",
    "report_page",
    "route",
    "serve",
    "summarise",
    "write_raw",
]

_EXTRA_PACKAGES = frozenset(
    {"torch", "triton", "numpy", "transformers", "fastapi", "starlette", "uvicorn"}
    | {"prometheus_client", "jinja2", "httpx"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Settings that a command line may give; None: not given. Units are `RuntimeConfig`'s."""

    device: str | None = None
    dtype: str | None = None
    proposer: str | None = None
    max_ngram: int | None = None
    num_speculative_tokens: int | None = None
    max_model_len: int | None = None
    max_num_requests: int | None = None
    max_num_waiting: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int | None = None
    kv_block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_memory_fraction: float | None = None
    enable_prefix_cache: bool | None = None
    graphs: str | None = None
    batch_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    verification: str | None = None
    dynamic_rows: int | None = None
    dynamic_rank: int | None = None
    force_anchor_layout: str | None = None
    length_mode: str | None = None
    cost_table: str | None = None
    pipeline_parallel: int | None = None
    tensor_parallel: int | None = None
    draft_tensor_parallel: int | None = None
    stage_layers: tuple[int, ...] | None = None
    stages_in_process: bool | None = None
    load_format: str | None = None
    rank_timeout_s: float | None = None

    def to_overrides(self) -> Overrides:
        """Return them as the runtime takes them."""
        from runtime.config import Overrides

        return Overrides(
            device=self.device,
            dtype=self.dtype,
            proposer=self.proposer,
            max_ngram=self.max_ngram,
            num_speculative_tokens=self.num_speculative_tokens,
            max_model_len=self.max_model_len,
            max_num_requests=self.max_num_requests,
            max_num_waiting=self.max_num_waiting,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_size=self.prefill_chunk_size,
            kv_block_size=self.kv_block_size,
            num_kv_blocks=self.num_kv_blocks,
            kv_memory_fraction=self.kv_memory_fraction,
            enable_prefix_cache=self.enable_prefix_cache,
            graphs=self.graphs,
            batch_buckets=self.batch_buckets,
            prefill_buckets=self.prefill_buckets,
            verification=self.verification,
            dynamic_rows=self.dynamic_rows,
            dynamic_rank=self.dynamic_rank,
            force_anchor_layout=self.force_anchor_layout,
            length_mode=self.length_mode,
            cost_table=self.cost_table,
            pipeline_parallel=self.pipeline_parallel,
            tensor_parallel=self.tensor_parallel,
            draft_tensor_parallel=self.draft_tensor_parallel,
            stage_layers=self.stage_layers,
            stages_in_process=self.stages_in_process,
            load_format=self.load_format,
            rank_timeout_s=self.rank_timeout_s,
        )


def serve(
    manifest: Path,
    engine: EngineOptions,
    options: ServeOptions,
    *,
    on_diagnostic: Callable[[Diagnostic], None],
) -> None:
    """Serve a manifest over HTTP until SIGTERM or SIGINT; returns after a graceful shutdown.

    Raises:
        DiagnosticError: SD834, and what `LLM.from_manifest` raises.
    """
    with _runtime_extra("runtime.engine.stage_process"):
        own = launched_options(manifest, engine)
        if own is None:
            return
        from runtime.server.start import serve_manifest

        serve_manifest(manifest, own.to_overrides(), options, on_diagnostic=on_diagnostic)


def route(options: RouteOptions) -> None:
    """Route requests to decode servers until SIGTERM or SIGINT.

    Raises:
        DiagnosticError: SD834, SD835 the address is taken, SD865 an address of a server.
    """
    with _runtime_extra("runtime.server.route"):
        from runtime.server.route import serve_route

        serve_route(options)


def generate(
    manifest: Path,
    engine: EngineOptions,
    options: GenerateOptions,
    *,
    on_text: Callable[[str], None],
    on_diagnostic: Callable[[Diagnostic], None],
) -> GenerateReport:
    """Answer one prompt; `on_text` gets the text as it comes.

    Raises:
        DiagnosticError: SD834, SD908-SD913, and what `LLM.from_manifest` raises.
    """
    with _runtime_extra("runtime.bench.single"):
        own = launched_options(manifest, engine)
        if own is None:
            raise SystemExit(0)  # rank 0 has the answer
        from runtime.bench.single import answer_one

        return answer_one(
            manifest, own.to_overrides(), options, on_text=on_text, on_diagnostic=on_diagnostic
        )


def bench(
    manifest: Path | None,
    engine: EngineOptions,
    settings: BenchSettings,
    *,
    on_progress: Callable[[str, int, int], None],
    on_diagnostic: Callable[[Diagnostic], None],
    on_point: Callable[[RawBench], None],
) -> RawBench:
    """Compare decoding with and without a draft and return the raw records; see `summarise`.

    `on_progress` is called with (arm, requests done, requests), `on_point` with everything so far
    whenever a point has ended.

    Raises:
        DiagnosticError: SD834, SD832, SD909, SD920-SD922, and what `load_for_bench` raises.
    """
    with _runtime_extra("runtime.bench.run"):
        own = engine if manifest is None else launched_options(manifest, engine)
        if own is None:
            raise SystemExit(0)  # rank 0 has the report
        from runtime.bench.run import run_bench

        return run_bench(
            manifest,
            own.to_overrides(),
            settings,
            on_progress=on_progress,
            on_diagnostic=on_diagnostic,
            on_point=on_point,
        )


def doctor_facts() -> dict[str, str | int | float | bool]:
    """Return what the runtime sees of this machine: versions, devices, free memory.

    Raises:
        ImportError: torch is not installed.
    """
    import torch

    facts: dict[str, str | int | float | bool] = {
        "torch": str(torch.__version__),
        "torch threads": torch.get_num_threads(),
        "triton": _triton_version(),
        "cuda": torch.version.cuda or "not in this build of torch",
    }
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts["cuda devices"] = count
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        facts[f"cuda:{index}"] = (
            f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    facts["default device"] = "cuda:0, bfloat16" if count else "cpu, float32"
    return facts


def launched_options(manifest: Path, engine: EngineOptions) -> EngineOptions | None:
    """Return the options of this process; None: it served as another rank than 0, and is done.

    Raises:
        DiagnosticError: SD832, a launcher started another number of processes than the options
            ask for, or says what cannot be; see `serve_rank` for another rank.
    """
    from runtime.engine.stage_process import serve_launched
    from runtime.parallel.launch import launch_of, refuse_another_size
    from runtime.parallel.layout import ParallelLayout

    launch = launch_of()
    if launch is None:
        return engine
    is_together = bool(engine.stages_in_process)
    layout = ParallelLayout(
        pipeline_parallel=1 if is_together else engine.pipeline_parallel or 1,
        tensor_parallel=engine.tensor_parallel or 1,
    )
    refuse_another_size(layout, launch)
    if launch.rank == 0:
        # The GPUs of one host do not tell whether launched stages share one.
        return replace(engine, stages_in_process=False) if layout.pipeline_parallel > 1 else engine
    serve_launched(manifest, layout, device=engine.device, rank_timeout_s=engine.rank_timeout_s)
    return None


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed (needed for CUDA)"
    return str(triton.__version__)


def import_interruptibly(module: str) -> None:
    """Import a module; a Ctrl-C meanwhile ends the command also where a package catches it.

    Importing torch takes seconds, and for a part of them an interrupt is caught and forgotten.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not is_main or handler is not signal.default_int_handler:  # somebody else decides
        importlib.import_module(module)
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    with handled([signal.SIGINT], note):
        importlib.import_module(module)
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def _runtime_extra(module: str) -> Iterator[None]:
    """Import what follows needs, and turn a missing package of the `runtime` extra into SD834."""
    try:
        import_interruptibly(module)
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_PACKAGES:
            raise
        raise DiagnosticError(
            diagnose(
                "SD834",
                where=f"Python package {package}",
                message=f"`{package}` is not installed, the runtime needs it",
                expected="the extra `runtime`",
                found="not installed",
            )
        ) from error
