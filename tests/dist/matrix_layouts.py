"""SmolLM2 answering the 80 prompts in a layout: stages, ranks, roles; see `tests.dist.matrix`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from runtime.config import DTYPES, Overrides
from runtime.disagg.memory import MemoryTransport
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.engine.text import load_tokenizer
from runtime.loading import load_models
from runtime.spec.types import SamplingParams
from specctl.contract.codec import dump_manifest, load_manifest, resolve_source
from specctl.ops.emit_manifest import emit_manifest
from tests import real_model
from tests.engine_harness import World
from tests.pd_harness import make_pair

PARAMS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=7),
}
MAX_MODEL_LEN = 1024
KV_BLOCK_SIZE = 16  # the default


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all arms share.

    Args:
        device: `cpu` or `cuda`; processes share one GPU.
        dtype: of weights and KV.
        num_prompts: MT-Bench first turns, from the first on.
        num_tokens: answers end after so many.
        concurrency: requests at once.
    """

    device: str = "cpu"
    dtype: str = "float32"
    num_prompts: int = 80
    num_tokens: int = 128
    concurrency: int = 8

    @property
    def num_kv_blocks(self) -> int:
        """Room for every request, and the block of padding."""
        return self.concurrency * MAX_MODEL_LEN // KV_BLOCK_SIZE + 1

    def overrides(self, **given: object) -> Overrides:
        """Return the settings of an engine."""
        base = Overrides(
            device=self.device,
            dtype=self.dtype,
            max_num_requests=self.concurrency,
            max_model_len=MAX_MODEL_LEN,
            max_num_waiting=self.num_prompts,
            num_kv_blocks=self.num_kv_blocks,
        )
        return replace(base, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a layout said.

    Args:
        ids_target: of each prompt.
        num_rounds: of all requests.
        num_accepted_drafts: of all requests.
        seconds: from the first request to the last answer.
    """

    ids_target: list[list[int]]
    num_rounds: int
    num_accepted_drafts: int
    seconds: float

    @property
    def accept_length(self) -> float:
        """One more than the drafts accepted in a round."""
        return 1 + self.num_accepted_drafts / max(1, self.num_rounds)


Layout: TypeAlias = Callable[[Path, Settings, SamplingParams], Answers]


def manifest_of(directory: Path, draft: str) -> Path:
    """Write the manifest of a draft; prediction layers get the token map beside them."""
    if draft == "eagle3":
        return real_model.write_manifest(directory)
    source = real_model.shared_draft(f"smollm2-135m-{draft}")
    if draft != "mtp":
        return real_model.write_manifest(directory, source, gamma=5)
    manifest = emit_manifest(
        str(real_model.target()),
        str(source),
        manifest_dir=directory,
        num_speculative_tokens=3,
        token_map=str(source / "token_map_8192.json"),
    )
    path = directory / "mtp.yaml"
    path.write_text(dump_manifest(manifest), encoding="utf-8")
    return path


def requests_of(settings: Settings, params: SamplingParams) -> list[RequestInput]:
    """Return the prompts as requests."""
    prompts, _ = real_model.all_eighty()
    return [
        RequestInput(
            request_id=str(number),
            prompt_ids_target=tuple(ids),
            params=params,
            max_tokens=settings.num_tokens,
        )
        for number, ids in enumerate(prompts[: settings.num_prompts])
    ]


def of_one_engine(
    manifest: Path, settings: Settings, params: SamplingParams, **given: object
) -> Answers:
    """Answer through an engine of this process, whose stages and ranks may be other processes."""
    llm = LLM.from_manifest(manifest, settings.overrides(**given))
    try:
        began = time.monotonic()
        done = llm.generate(requests_of(settings, params))
        seconds = time.monotonic() - began
    finally:
        llm.close()
    return Answers(
        ids_target=[list(item.ids_target) for item in done],
        num_rounds=sum(item.usage.num_rounds for item in done),
        num_accepted_drafts=sum(item.usage.num_accepted_drafts for item in done),
        seconds=seconds,
    )


def of_two_engines(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through both roles as engines of this process: any device, no HTTP."""
    loaded = load_manifest(manifest)
    models = load_models(
        loaded,
        manifest.parent,
        device=torch.device(settings.device),
        dtype=DTYPES[settings.dtype],
        with_draft=True,
    )
    source = resolve_source(loaded.target.source, manifest.parent)
    world = World(manifest=loaded, models=models, tokenizer=load_tokenizer(source))
    given = {name: value for name, value in asdict(settings.overrides()).items() if value}
    pair = make_pair(
        world,
        transport=MemoryTransport(),
        decode_overrides={"graphs": "auto"},
        **given | {"max_num_waiting": settings.num_prompts},
    )
    try:
        began = time.monotonic()
        found = pair.run(requests_of(settings, params))
        seconds = time.monotonic() - began
        pair.assert_nothing_is_held()
    finally:
        pair.close()
    done = [found[str(number)] for number in range(settings.num_prompts)]
    return Answers(
        ids_target=[list(item.ids_target) for item in done],
        num_rounds=sum(item.usage.num_rounds for item in done),
        num_accepted_drafts=sum(item.usage.num_accepted_drafts for item in done),
        seconds=seconds,
    )


def two_servers(
    manifest: Path, settings: Settings, params: SamplingParams, *prefill_options: str
) -> Answers:
    """Answer through a decode server, whose prompts a prefill server computes; CPU."""
    from tests.dist.matrix_servers import answers  # a GPU host may have no HTTP

    requests = requests_of(settings, params)
    options = (
        *("--dtype", settings.dtype, "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-requests", str(settings.concurrency)),
        *("--num-kv-blocks", str(settings.num_kv_blocks)),
    )
    found = answers(manifest, requests, options=options, prefill_options=prefill_options)
    return Answers(
        ids_target=found.ids_target,
        num_rounds=found.num_rounds,
        num_accepted_drafts=found.num_accepted_drafts,
        seconds=found.seconds,
    )


def pipelined(num_stages: int, *, in_process: bool = False) -> Layout:
    """Return a layout of stages."""

    def answer(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
        return of_one_engine(
            manifest,
            settings,
            params,
            pipeline_parallel=num_stages,
            stages_in_process=in_process,
        )

    return answer


def one_process(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through one process."""
    return of_one_engine(manifest, settings, params)


def roles(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through a prefill and a decode server, which are processes on a CPU."""
    if settings.device == "cpu":
        return two_servers(manifest, settings, params)
    return of_two_engines(manifest, settings, params)


def staged_prefill(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through a decode server and a prefill server of two stages; CPU."""
    return two_servers(manifest, settings, params, "--pp", "2")


def three_ranks(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through three tensor-parallel ranks."""
    return of_one_engine(manifest, settings, params, tensor_parallel=3)


def three_ranks_alone(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through three tensor-parallel ranks without a draft."""
    return of_one_engine(manifest, settings, params, tensor_parallel=3, proposer="none")


LAYOUTS: dict[str, Layout] = {
    "one": one_process,
    "pp2": pipelined(2),
    "pp4": pipelined(4),
    "pp2-in-process": pipelined(2, in_process=True),
    "pd": roles,
    "pd-pp2": staged_prefill,
    "tp3": three_ranks,
    "tp3-alone": three_ranks_alone,
}
