"""What processes over stages, ranks and roles must answer, on whichever device there is.

`tests/dist` runs these on the CPU, `tests/gpu` on GPUs: the same processes, the same requests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import torch

from runtime.config import Overrides, resolve_config
from runtime.disagg.carriers import make_transport
from runtime.engine.build import build_engine
from runtime.engine.llm import LLM
from runtime.engine.lockstep import EngineOrder
from runtime.engine.request import RequestInput, Usage
from runtime.loading import load_models
from runtime.parallel.ranks import Ranks
from runtime.server.loop import EnginePort
from runtime.server.role_settings import RoleOptions
from runtime.server.roles import DecodeRole, role_plan
from runtime.spec.types import SamplingParams
from specctl.contract.codec import load_manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.rank_harness import answer, on_ranks
from tests.tiny import Sizes, write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_manifest import write_manifest

ROOT = Path(__file__).parents[1]
WAIT_S = 300.0
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=7),
    SamplingParams(temperature=1.0, top_k=30, seed=9),
)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 3 + 8 * index),
        params=params,
        max_tokens=14,
        ignore_eos=True,
    )
    for index, params in enumerate(PARAMS)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Ids by request, drafts accepted over all of them, and how tensors travelled."""

    ids: dict[str, tuple[int, ...]]
    num_accepted_drafts: int
    transport: str | None = None


def write_qwen3(directory: Path) -> Path:
    """Write a Qwen3 target of four layers, an EAGLE-3 draft that is often right, and a manifest."""
    sizes = Sizes(hidden=32, heads=4, kv_heads=2, head_dim=8, inner=64)
    target = write_tiny_target(directory / "target", "qwen3", layer_gain=0.15, sizes=sizes)
    draft = write_agreeing_eagle3(directory / "draft", target)
    return write_manifest(
        directory, emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    )


def small(device: str) -> Overrides:
    """Return settings under which several processes fit on one GPU."""
    return Overrides(
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        kv_block_size=8,
        num_kv_blocks=40,
        max_num_requests=3,
        max_num_batched_tokens=40,
        max_model_len=96,
    )


def answers_of(manifest: Path, overrides: Overrides, *, num_runs: int = 1) -> Answers:
    """Serve the requests with the processes that the settings ask for; runs must be equal."""
    llm = LLM.from_manifest(manifest, overrides, needs_tokenizer=False)
    try:
        runs = [llm.generate(REQUESTS) for _ in range(num_runs)]
        transport = llm.transport
    finally:
        llm.close()
    ids = [{item.request_id: item.ids_target for item in found} for found in runs]
    assert all(found == ids[0] for found in ids)
    num_accepted = sum(item.usage.num_accepted_drafts for item in runs[0])
    return Answers(ids=ids[0], num_accepted_drafts=num_accepted, transport=transport)


def emulated_ranks(manifest_path: Path, overrides: Overrides, size: int) -> Answers:
    """Serve the requests with ranks that are threads: the same partials in the same order."""
    manifest = load_manifest(manifest_path)
    config = resolve_config(manifest, replace(overrides, graphs="off"))

    def one(ranks: Ranks) -> Answers:
        models = load_models(
            manifest, manifest_path.parent, device=config.device, dtype=config.dtype, ranks=ranks
        )
        order = EngineOrder(config=config)
        outcome = answer(build_engine(models, order.config), REQUESTS)
        return Answers(ids=outcome.ids_target, num_accepted_drafts=outcome.num_accepted_drafts)

    first, *others = on_ranks(size, one)
    assert all(other == first for other in others)
    return first


@contextmanager
def prefill_process(manifest: Path, device: str) -> Iterator[str]:
    """Start a prefill server of one process; yield its address."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.prefill_process", str(manifest), device],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # its end is the child's
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        address = child.stdout.readline().strip()
        assert address, f"the prefill process ended with {child.wait(WAIT_S)}"
        yield address
    finally:
        child.communicate(timeout=WAIT_S)


def prefilled_elsewhere(
    manifest: Path, device: str, *, num_runs: int = 1, requests: Sequence[RequestInput] = REQUESTS
) -> Answers:
    """Decode here what another process prefills; runs must be equal."""
    transport = make_transport("shared", host="127.0.0.1")
    with prefill_process(manifest, device) as address:
        llm = LLM.from_manifest(
            manifest, small(device), needs_tokenizer=False, allocate=transport.allocate
        )
        options = RoleOptions(role="decode", peers=(address,))
        role = DecodeRole(llm, role_plan(options, weights=""), options, transport)
        news = Event()
        role.start(news.set)
        try:
            runs = [drive(role.engine, requests) for _ in range(num_runs)]
            stats = role.engine.stats()
            assert stats.num_free_kv_blocks == stats.num_kv_blocks
        finally:
            role.close()
            llm.close()
    assert all(found.ids == runs[0].ids for found in runs)
    return runs[0]


def lost_rank(
    manifest: Path,
    device: str,
    layout: str,
    signal_name: str,
    *,
    rank_timeout_s: float,
    within_s: float,
) -> str:
    """Return what a process says that lost its other rank; see `tests.lost_rank`.

    Args:
        manifest: that it serves.
        device: of its ranks.
        layout: `tp` or `pp`, of two processes.
        signal_name: what the other rank gets amid requests.
        rank_timeout_s: of the layout.
        within_s: to start, to notice and to end; then `TimeoutExpired`.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.lost_rank", str(manifest), device, layout),
            *(signal_name, str(rank_timeout_s)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=within_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def drive(engine: EnginePort, requests: Sequence[RequestInput]) -> Answers:
    """Run requests to their ends."""
    for request in requests:
        engine.add_request(request)
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    usages: dict[str, Usage] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            ids[delta.request_id] += delta.ids_target
            usages[delta.request_id] = delta.usage
    return Answers(
        ids={name: tuple(found) for name, found in ids.items()},
        num_accepted_drafts=sum(usage.num_accepted_drafts for usage in usages.values()),
    )


def num_gpus() -> int:
    """Return the GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
