"""What stages and roles cost on one GPU: one JSON line for each figure.

    python docs/benchmarks/pipeline.py m.yaml                       # SmolLM2 with EAGLE-3, one GPU
    python docs/benchmarks/pipeline.py tiny.yaml --device cpu --prompt-tokens 48 --tokens 16

`stages`: two stages in one process against one stage, batch 1, per token; arms alternate A B B A.
`processes`: two stages as two processes (CUDA IPC on one GPU), per token, and equal ids.
`hand-off`: from the end of the last prefill kernel to the start of the first decode round, with
both roles in one process, less the same gap of one engine; by events on the device.
`hand-off-processes`: the same gap with each role in a process, by events put on the host's clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event

import torch
from pd_pair import OVER, Marks, join, serve_prefill

from runtime.config import Overrides
from runtime.disagg.carriers import make_transport
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.loading.weight_samples import weights_digest
from runtime.server.loop import EnginePort
from runtime.server.role_settings import RoleOptions
from runtime.server.roles import DecodeRole, role_plan
from specctl.contract.diagnostics import DiagnosticError

FIGURES = ("stages", "processes", "hand-off", "hand-off-processes")


def settings(given: argparse.Namespace) -> Overrides:
    """Return settings of a batch of one; pools are small, so that several engines fit."""
    length = given.prompt_tokens + given.tokens + 32
    return Overrides(
        device=given.device,
        max_model_len=length,
        max_num_requests=1,
        max_num_batched_tokens=max(64, given.prompt_tokens),
        num_kv_blocks=2 * (length // 16 + 4),
        enable_prefix_cache=False,
    )


def request_of(llm: LLM, given: argparse.Namespace, seed: int) -> RequestInput:
    """Return a random prompt."""
    generator = torch.Generator().manual_seed(seed)
    num_ids = llm.models.target.num_reachable_ids
    ids = torch.randint(num_ids, (given.prompt_tokens,), generator=generator)
    return RequestInput(
        request_id=f"r{seed}",
        prompt_ids_target=tuple(ids.tolist()),
        max_tokens=given.tokens,
        ignore_eos=True,
    )


def decode(llm: LLM, request: RequestInput) -> tuple[float, tuple[int, ...]]:
    """Return microseconds per token after the first delta, and the ids."""
    llm.engine.add_request(request)
    ids: list[int] = []
    first_s, num_first = 0.0, 0
    while llm.engine.has_work:
        for delta in llm.engine.step():
            if not ids:
                first_s, num_first = time.perf_counter(), len(delta.ids_target)
            ids += delta.ids_target
    return (time.perf_counter() - first_s) * 1e6 / (len(ids) - num_first), tuple(ids)


def show(figure: str, values: Sequence[float], unit: str, **more: object) -> None:
    """Print a figure: the median and the range."""
    found = {"figure": figure, "median": round(statistics.median(values), 2), "unit": unit}
    found |= {"low": round(min(values), 2), "high": round(max(values), 2), "count": len(values)}
    print(json.dumps(found | more), flush=True)


def stages(given: argparse.Namespace, path: Path) -> None:
    """Compare two stages in one process with one, with the draft and without."""
    one = LLM.from_manifest(path, settings(given), needs_tokenizer=False)
    over = replace(settings(given), pipeline_parallel=2, stages_in_process=True)
    two = LLM.from_manifest(path, over, needs_tokenizer=False)
    for name, arms in (
        ("speculative", (one, two)),
        ("target-only", tuple(
            llm.sibling(proposer="none", num_speculative_tokens=0) for llm in (one, two)
        )),
    ):  # fmt: skip
        added, alone, spread, is_equal = [], [], [], True
        for repeat in range(-1, given.repeats):
            request = request_of(one, given, seed=repeat + 2)
            runs = [decode(arms[arm], request) for arm in (0, 1, 1, 0)]
            is_equal &= len({ids for _, ids in runs}) == 1
            if repeat >= 0:  # the first run of all is a warm-up
                alone.append((runs[0][0] + runs[3][0]) / 2)
                spread.append((runs[1][0] + runs[2][0]) / 2)
                added.append(spread[-1] - alone[-1])
        show(f"stages: one stage, {name}", alone, "us/token")
        show(f"stages: two stages in one process, {name}", spread, "us/token")
        show(f"stages: added, {name}", added, "us/token", goal=60, equal=is_equal)


def processes(given: argparse.Namespace, path: Path) -> None:
    """Time two stages as processes."""
    one = LLM.from_manifest(path, replace(settings(given), graphs="off"), needs_tokenizer=False)
    over = replace(settings(given), pipeline_parallel=2, stages_in_process=False)
    with closing(LLM.from_manifest(path, over, needs_tokenizer=False)) as two:
        alone, spread, is_equal = [], [], True
        for repeat in range(-1, given.repeats):
            request = request_of(one, given, seed=repeat + 2)
            runs = [decode(llm, request) for llm in (one, two, two, one)]
            is_equal &= len({ids for _, ids in runs}) == 1
            if repeat >= 0:
                alone.append((runs[0][0] + runs[3][0]) / 2)
                spread.append((runs[1][0] + runs[2][0]) / 2)
        show("processes: one stage, eager", alone, "us/token")
        show("processes: two stages", spread, "us/token", transport=two.transport, equal=is_equal)


def run_until_decoded(
    engine: EnginePort, request: RequestInput, *others: EnginePort
) -> tuple[int, ...]:
    """Run a request to its end, stepping other engines beside it."""
    engine.add_request(request)
    ids: list[int] = []
    while engine.has_work:
        for other in others:
            other.step()
        for delta in engine.step():
            if delta.error is not None:
                raise DiagnosticError([delta.error])
            ids += delta.ids_target
    return tuple(ids)


def hand_off(given: argparse.Namespace, path: Path) -> None:
    """Compare the gap between prefill and decode of two roles in one process with one engine's."""
    prefill = LLM.from_manifest(path, settings(given), needs_tokenizer=False)
    whole = LLM.from_manifest(path, settings(given), needs_tokenizer=False)
    marks = Marks(device=whole.config.device)
    marks.watch(prefill)
    marks.watch(whole)
    sender, receiver = join(prefill, whole)

    def gap(seed: int, *, is_split: bool) -> tuple[float, tuple[int, ...]]:
        marks.reset()
        request = request_of(whole, given, seed)
        if is_split:
            ids = run_until_decoded(receiver, request, sender)
        else:
            ids = run_until_decoded(whole.engine, request)
        return marks.gap_us(), ids

    split, joined, is_equal = [], [], True
    for seed in range(given.repeats + 2):
        runs = [gap(seed, is_split=is_split) for is_split in (False, True, True, False)]
        is_equal &= len({ids for _, ids in runs}) == 1
        if seed >= 2:
            joined.append((runs[0][0] + runs[3][0]) / 2)
            split.append((runs[1][0] + runs[2][0]) / 2)
    show("hand-off: gap of one engine", joined, "us")
    show("hand-off: gap of two roles in one process", split, "us")
    exposed = [a - b for a, b in zip(split, joined, strict=True)]
    show("hand-off: exposed", exposed, "us", goal=300, equal=is_equal)


def hand_off_processes(given: argparse.Namespace, path: Path) -> None:
    """Measure the gap with a process for each role."""
    command = [sys.executable, __file__, *sys.argv[1:], "--prefill-server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        told, end = child.stdout, child.stdin
        if told is None or end is None:
            raise SystemExit("the prefill process has no pipes")
        address = told.readline().strip()
        transport = make_transport("shared", host="127.0.0.1")
        llm = LLM.from_manifest(
            path, settings(given), needs_tokenizer=False, allocate=transport.allocate
        )
        options = RoleOptions(role="decode", peers=(address,))
        plan = role_plan(options, weights=weights_digest(llm.manifest, path.parent))
        role = DecodeRole(llm, plan, options, transport)
        role.start(Event().set)
        marks = Marks(device=llm.config.device)
        marks.watch(llm)
        gaps = []
        try:
            for seed in range(given.repeats + 2):
                marks.reset()
                run_until_decoded(role.engine, request_of(llm, given, seed))
                gaps.append((marks.decoding_at_s() - float(told.readline())) * 1e6)
        finally:  # first the decode role, which the other process then expects to leave
            end.close()
            while told.readline().strip() not in ("", OVER):
                pass
            role.close()
            llm.close()
    if child.returncode:
        raise SystemExit(f"the prefill process ended with {child.returncode}")
    show("hand-off-processes: gap of two roles", gaps[2:], "us", transport="shared")


def main() -> None:
    """Print the figures that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=FIGURES)
    parser.add_argument("--prefill-server", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.prefill_server:
        serve_prefill(given.manifest, settings(given))
        return
    runs = (stages, processes, hand_off, hand_off_processes)
    for name, run in zip(FIGURES, runs, strict=True):
        if name in given.figures:
            run(given, given.manifest)


if __name__ == "__main__":
    main()
