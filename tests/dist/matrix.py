"""The 80-prompt matrix: SmolLM2 and its drafts over every layout, compared with one process.

    python -m tests.dist.matrix --out DIR [--device cuda --dtype bfloat16] [ARM ...]

Each arm is a file of DIR, so a run that was cut short goes on where it stopped; the reference of a
draft is computed once. A table is printed; the status is 1 when an arm differs from its reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import httpx
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
from tests.e2e.split import split_servers
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

    def overrides(self, **given: object) -> Overrides:
        """Return the settings of an engine."""
        base = Overrides(
            device=self.device,
            dtype=self.dtype,
            max_num_requests=self.concurrency,
            max_model_len=MAX_MODEL_LEN,
            max_num_waiting=self.num_prompts,
            num_kv_blocks=self.concurrency * MAX_MODEL_LEN // KV_BLOCK_SIZE + 1,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """An arm beside its reference.

    Args:
        reference: the arm that it is compared with.
        num_equal: prompts with the same ids.
        first_difference: prompt and position; None: there is none.
        accept_lengths: of the reference and of the arm.
        has_equal_rounds: whether rounds and accepted drafts are equal, where they must be.
        seconds: of the reference and of the arm.
    """

    arm: str
    reference: str
    num_equal: int
    num_prompts: int
    first_difference: tuple[int, int] | None
    accept_lengths: tuple[float, float]
    has_equal_rounds: bool
    seconds: tuple[float, float]

    @property
    def is_equal(self) -> bool:
        """Whether tokens are equal, and rounds where they must be."""
        return self.num_equal == self.num_prompts and self.has_equal_rounds

    def row(self) -> str:
        """Return a line of the table."""
        one, other = self.accept_lengths
        where = "" if self.first_difference is None else f" (first: {self.first_difference})"
        return (
            f"| {self.arm.replace(':', ' | ')} | {self.num_equal}/{self.num_prompts}{where} "
            f"| {other:.4f} | {one:.4f} | {self.seconds[1]:.0f} | {self.seconds[0]:.0f} |"
        )


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


def of_two_servers(
    manifest: Path, settings: Settings, params: SamplingParams, *prefill_options: str
) -> Answers:
    """Answer through a decode server, whose prompts a prefill server computes; CPU."""
    options = (
        *("--dtype", settings.dtype, "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-requests", str(settings.concurrency)),
        *("--num-kv-blocks", str(settings.concurrency * MAX_MODEL_LEN // KV_BLOCK_SIZE + 1)),
    )
    sampling: dict[str, object] = {"temperature": params.temperature, "max_tokens": 0}
    if params.temperature:
        sampling |= {"top_p": params.top_p, "seed": params.seed}
    with split_servers(manifest, manifest.parent, *options, prefill_options=prefill_options) as (
        prefill,
        decode,
    ):
        url = f"{decode[0].url}/v1/completions"

        def ask(request: RequestInput) -> list[int]:
            body = sampling | {"prompt": list(request.prompt_ids_target), "return_token_ids": True}
            body["max_tokens"] = request.max_tokens
            answer = httpx.post(url, json=body, timeout=3600, trust_env=False)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        began = time.monotonic()
        with ThreadPoolExecutor(settings.concurrency) as pool:
            found = list(pool.map(ask, requests_of(settings, params)))
        seconds = time.monotonic() - began
        metrics = decode[0].wait_idle()
        prefill[0].wait_idle()
    return Answers(
        ids_target=found,
        num_rounds=int(metrics["specctl_rounds_total"]),
        num_accepted_drafts=int(metrics["specctl_accepted_drafts_total"]),
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
        return of_two_servers(manifest, settings, params)
    return of_two_engines(manifest, settings, params)


def staged_prefill(manifest: Path, settings: Settings, params: SamplingParams) -> Answers:
    """Answer through a decode server and a prefill server of two stages; CPU."""
    return of_two_servers(manifest, settings, params, "--pp", "2")


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
DRAFTS = ("eagle3", "dspark", "mtp")
ARMS = (
    *("eagle3:pp2:greedy", "eagle3:pd:greedy", "eagle3:pd-pp2:greedy", "eagle3:pp2:seeded"),
    *("eagle3:pd:seeded", "dspark:pp2:greedy", "mtp:pp4:greedy", "eagle3:pd-pp2:seeded"),
    *("dspark:pp2:seeded", "mtp:pp4:seeded", "dspark:pd:greedy", "mtp:pd:greedy"),
    *("eagle3:tp3:greedy", "eagle3:tp3:seeded", "eagle3:pp2-in-process:greedy"),
)
"""Draft, layout and sampling of each arm, the most telling ones first."""


class Folder:
    """Answers that were kept."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Keep them in `path`, made on demand."""
        self._path = path
        self._settings = settings
        path.mkdir(parents=True, exist_ok=True)

    def answers(self, arm: str) -> Answers:
        """Return an arm's answers, computed when they are not there."""
        settings = self._settings
        numbers = f"{settings.num_prompts}x{settings.num_tokens}"
        name = f"{arm.replace(':', '_')}_{settings.device}_{settings.dtype}_{numbers}"
        kept = self._path / f"{name}.json"
        if not kept.exists():
            draft, layout, sampling = arm.split(":")
            with tempfile.TemporaryDirectory() as directory:
                manifest = manifest_of(Path(directory), draft)
                found = LAYOUTS[layout](manifest, settings, PARAMS[sampling])
            kept.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return Answers(**json.loads(kept.read_text("utf-8")))

    def outcome(self, arm: str) -> Outcome:
        """Compare an arm with its reference and keep what was found."""
        draft, layout, sampling = arm.split(":")
        reference = f"{draft}:{'tp3-alone' if layout == 'tp3' else 'one'}:{sampling}"
        expected, found = self.answers(reference), self.answers(arm)
        pairs = list(zip(expected.ids_target, found.ids_target, strict=True))
        unequal = [number for number, (one, other) in enumerate(pairs) if one != other]
        rounds = (expected.num_rounds, found.num_rounds)
        accepted = (expected.num_accepted_drafts, found.num_accepted_drafts)
        return Outcome(
            arm=arm,
            reference=reference,
            num_equal=len(pairs) - len(unequal),
            num_prompts=len(pairs),
            first_difference=None if not unequal else (unequal[0], _first(*pairs[unequal[0]])),
            accept_lengths=(expected.accept_length, found.accept_length),
            has_equal_rounds=layout == "tp3"
            or (rounds, accepted) == (rounds[:1] * 2, accepted[:1] * 2),
            seconds=(expected.seconds, found.seconds),
        )


def _first(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first position at which two answers differ."""
    shared = min(len(one), len(other))
    return next((index for index in range(shared) if one[index] != other[index]), shared)


COLUMNS = (
    *("draft", "layout", "sampling", "prompts equal", "accept length", "of its reference"),
    *("s", "s of its reference"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run arms and print the table."""
    parser = argparse.ArgumentParser(prog="tests.dist.matrix")
    parser.add_argument("arms", nargs="*", default=ARMS, help="draft:layout:sampling")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--minutes", type=float, help="no arm starts after that")
    given = parser.parse_args(arguments)
    settings = Settings(
        device=given.device,
        dtype=given.dtype,
        num_prompts=given.prompts,
        num_tokens=given.tokens,
        concurrency=given.concurrency,
    )
    folder = Folder(given.out, settings)
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n")
    is_equal = True
    for arm in given.arms:
        if end is not None and time.monotonic() > end:
            sys.stdout.write(f"not run, out of time: {arm}\n")
            continue
        outcome = folder.outcome(arm)
        is_equal = is_equal and outcome.is_equal
        sys.stdout.write(outcome.row() + "\n")
        sys.stdout.flush()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
