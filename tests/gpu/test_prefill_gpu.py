"""Captured prefills on CUDA equal eager ones: KV, draft state, answers; with poisoned leftovers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides, RuntimeConfig
from runtime.config.values import DEFAULT_PREFILL_BUCKETS
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.graphs.capture import GraphSet
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.round import DeviceRound, batch_sizes, context_buckets
from runtime.graphs.state import RoundShape
from runtime.spec.types import SamplingParams
from tests import real_model
from tests.engine_harness import prompt_of
from tests.fake_graph import ids_of, make_llm, poison_padding
from tests.prefill_cases import (
    FILTERED,
    KINDS,
    SAMPLED,
    after_prefill,
    check_one_prefill,
    crowd,
    one_by_one,
    prefill_request,
    prefill_world,
)
from tests.tiny_manifest import load_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
BUCKETS = (16, 40, 64)
LENGTHS = (1, 15, 16, 17, 33, 40, 41, 64)


class PoisonedPrefills(GraphSet):
    """Captured graphs; what padding may read and what a replay left is overwritten before each."""

    def __init__(self, round_: DeviceRound, config: RuntimeConfig) -> None:
        super().__init__(
            round_,
            batches=batch_sizes(config.batch_buckets, config.max_num_requests),
            draft_counts=(config.num_speculative_tokens,),
            contexts=context_buckets(config.max_model_len),
            kinds=("greedy", "sampled", "filtered"),
        )
        self.round = round_
        self.prefills: list[PrefillShape] = []

    def launch(self, shape: RoundShape, buffer: int) -> None:
        poison_padding(self.round)
        super().launch(shape, buffer)

    def launch_prefill(self, shape: PrefillShape) -> None:
        self.prefills.append(shape)
        prefill = self.round.prefill
        assert prefill is not None
        poison_padding(self.round)
        prefill.output_R.fill_(-7)
        super().launch_prefill(shape)
        prefill.inputs_X.fill_(10**9)

    def read_prefill(self, num_prompts: int) -> list[int]:
        tokens = super().read_prefill(num_prompts)
        self._pinned_tokens.fill_(-9)
        return tokens


def _request(length: int, **fields: object) -> RequestInput:
    return prefill_request(length, length, **({"max_tokens": 24} | fields))


def _pair(folder: Path, kind: str, **settings: object) -> tuple[LLM, LLM, PoisonedPrefills]:
    """Return an engine with eager prefills and one with captured ones."""
    made = prefill_world(folder, kind)
    world = replace(made, models=load_tiny(made.manifest, device=CUDA, dtype=torch.bfloat16))
    settings = {
        "proposer": kind,
        "num_speculative_tokens": 0 if kind == "none" else 3,
        "max_model_len": 512,
        "prefill_chunk_size": 64,
        **settings,
    }
    runners: list[PoisonedPrefills] = []

    def make_runner(round_: DeviceRound, config: RuntimeConfig) -> PoisonedPrefills:
        runners.append(PoisonedPrefills(round_, config))
        return runners[-1]

    eager, _ = make_llm(world, is_eager=True, **(settings | {"graphs": "off"}))
    captured, _ = make_llm(world, make_runner=make_runner, **settings)
    (runner,) = runners
    return eager, captured, runner


@pytest.mark.parametrize("kind", KINDS)
def test_captured_prefills_equal_eager_ones(tmp_path: Path, kind: str) -> None:
    eager, captured, runner = _pair(tmp_path, kind, max_num_requests=2, prefill_buckets=BUCKETS)
    assert len(runner.prefill_shapes) == 4 * len(BUCKETS), "two contexts, two kinds more"
    for length in LENGTHS:
        request = _request(length)
        expected, found = after_prefill(eager, request), after_prefill(captured, request)
        assert found[0] == expected[0], f"prompt of {length}"
        for one, other in zip(found[1], expected[1], strict=True):
            assert torch.equal(one, other), f"prompt of {length}"
    assert [shape.num_rows for shape in runner.prefills] == [
        min(size for size in BUCKETS if size >= length) for length in LENGTHS
    ]
    shared = prompt_of(3, 48)
    requests = [
        *(_request(length) for length in (7, 100, 300)),  # the last one: the long context
        _request(60, prompt_ids_target=(*shared, *prompt_of(9, 12))),
        _request(55, prompt_ids_target=(*shared, *prompt_of(10, 7))),
    ]
    runner.prefills.clear()
    assert one_by_one(captured, requests) == one_by_one(eager, requests)
    assert [shape.context for shape in runner.prefills] == [256, 256, 512, 256, 256]
    assert captured.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    captured.engine.check()


@pytest.mark.parametrize("kind", KINDS)
def test_captured_prefills_of_several_prompts(tmp_path: Path, kind: str) -> None:
    eager, captured, runner = _pair(
        tmp_path, kind, max_num_requests=12, prefill_buckets=(24, 96, 512)
    )
    crowds = ((1, 1), (7, 33, 17, 1, 24), (64,) * 8, (3, 64, 40, 16, 1, 50, 33, 31))
    for lengths in crowds:
        check_one_prefill(eager, captured, lengths)
    assert len(runner.prefills) < sum(map(len, crowds)) / 2
    requests = crowd(24)
    assert ids_of(captured.generate(requests)) == ids_of(eager.generate(requests))
    assert captured.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at


@pytest.mark.parametrize("kind", KINDS)
def test_captured_prefills_of_prompts_that_sample(tmp_path: Path, kind: str) -> None:
    eager, captured, runner = _pair(tmp_path, kind, max_num_requests=6, prefill_buckets=(24, 96))
    for laws in ((SAMPLED,), (SAMPLED, FILTERED, SamplingParams())):
        check_one_prefill(eager, captured, (7, 17, 1, 24), laws)
        requests = [
            replace(request, params=laws[i % len(laws)]) for i, request in enumerate(crowd(12))
        ]
        assert ids_of(captured.generate(requests)) == ids_of(eager.generate(requests))
    assert {shape.kind for shape in runner.prefills} >= {"sampled", "filtered"}


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_smollm2_with_and_without_captured_prefills(tmp_path: Path, proposer: str) -> None:
    """Equal answers; tells the time to the first token of a prompt, and what capturing took."""
    manifest = real_model.write_manifest(tmp_path)
    prompts, _ = real_model.first_eight()
    answers = []
    for buckets in ((), DEFAULT_PREFILL_BUCKETS):
        llm = LLM.from_manifest(
            manifest,
            Overrides(
                proposer=proposer,
                device="cuda",
                max_num_requests=1,
                enable_prefix_cache=False,
                prefill_buckets=buckets,
            ),
        )
        answers.append(ids_of(real_model.answer(llm, prompts)))
        taken = []
        for turn in range(8):
            request = RequestInput(
                request_id=f"t{turn}",
                prompt_ids_target=[(turn * 131 + j * 7) % 40000 + 20 for j in range(120)],
                max_tokens=1,
                ignore_eos=True,
            )
            start = time.perf_counter()
            llm.generate([request])
            taken.append(time.perf_counter() - start)
        report = llm.engine.graph_report
        sys.stdout.write(
            f"\n{proposer}, buckets {buckets}: first token {1e3 * min(taken):.2f} ms (120 rows); "
            f"{report.num_graphs} graphs, {report.capture_s:.1f} s, "
            f"{report.memory_bytes / 2**20:.0f} MiB\n"
        )
        llm.close()
    assert answers[0] == answers[1]
