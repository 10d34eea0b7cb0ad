"""Captured rounds on CUDA equal eager ones: tokens, counts, batches, buckets, flush and poison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from runtime.config import Overrides, RuntimeConfig
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.graphs.capture import GraphSet
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.round import SPLIT_BUFFER, DeviceRound, batch_sizes, context_buckets
from runtime.graphs.state import RoundShape
from runtime.spec.types import SamplingParams
from tests import real_model
from tests.engine_harness import World, make_world, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world, make_llm, poison_padding
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_grammar import Grammar, Rule, Slow, parity, tens
from tests.tiny_last_state import last_state_world
from tests.tiny_manifest import load_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 5 * index),
        max_tokens=20 + 3 * index,
        ignore_eos=index % 2 == 0,
    )
    for index in range(12)
)


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("graphs-gpu")
    return make_world(folder, device=CUDA, dtype=getattr(torch, request.param))


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("agreeing-gpu")
    return make_agreeing_world(folder, device=CUDA, dtype=torch.bfloat16)


class Poisoned:
    """A graph set whose leftovers are overwritten before every replay."""

    def __init__(self, round_: DeviceRound, config: RuntimeConfig) -> None:
        self.batches = batch_sizes(config.batch_buckets, config.max_num_requests)
        self.draft_counts = (config.num_speculative_tokens,)
        self.contexts = context_buckets(config.max_model_len, first=32)
        self.graphs = GraphSet(
            round_, batches=self.batches, draft_counts=self.draft_counts, contexts=self.contexts
        )
        self.round = round_
        self.shapes: list[RoundShape] = []
        self.prefill_shapes = self.graphs.prefill_shapes
        self.num_prefills = 0

    def launch_prefill(self, shape: PrefillShape) -> None:
        self.num_prefills += 1
        prefill = self.round.prefill
        assert prefill is not None
        poison_padding(self.round)
        prefill.output_R.fill_(-7)
        self.graphs.launch_prefill(shape)
        prefill.inputs_X.fill_(0)  # no later replay may read what this one was given

    def read_prefill(self, num_prompts: int) -> list[int]:
        tokens = self.graphs.read_prefill(num_prompts)
        self.graphs._pinned_tokens.fill_(-9)
        return tokens

    def settle(self) -> None:
        self.graphs.settle()

    def packed_row_counts(self, batch: int, num_drafts: int) -> tuple[int, ...]:
        return self.graphs.packed_row_counts(batch, num_drafts)

    def counted(self, buffer: int, num_requests: int) -> list[int] | None:
        return self.graphs.counted(buffer, num_requests)

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        return self.graphs.confidence(buffer, num_requests)

    def launch(self, shape: RoundShape, buffer: int) -> None:
        self.shapes.append(shape)
        poison_padding(self.round)
        self.round.state.output_BX.fill_(-7)
        self.graphs.launch(shape, buffer)

    def make_ready(self, shape: RoundShape) -> None:
        self.graphs.make_ready(shape)

    def launch_drafts(self, shape: RoundShape) -> None:
        self.shapes.append(shape)
        poison_padding(self.round)
        assert self.round.split is not None
        self.round.split.drafts_BG.fill_(1)
        self.graphs.launch_drafts(shape)

    def read_drafts(self, num_requests: int) -> list[list[int]]:
        rows = self.graphs.read_drafts(num_requests)
        self.graphs._pinned_drafts.fill_(-9)
        return rows

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        rows = self.graphs.read(buffer, num_requests)
        for tensor in self.graphs._outcomes.host[buffer].tensors():
            tensor.fill_(-9)
        if buffer == SPLIT_BUFFER:  # no later round may read these masks
            assert self.round.split is not None
            self.round.split.words_BWX.fill_(0)
            self.round.split.host_words_BWX.fill_(0)
        return rows


@pytest.mark.parametrize("num_requests", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("proposer", "gamma"), [("none", 0), ("eagle3", 1), ("eagle3", 4)])
def test_captured_rounds_equal_eager_ones(
    world: World, proposer: str, gamma: int, num_requests: int
) -> None:
    settings = {
        "proposer": proposer, "num_speculative_tokens": gamma, "max_num_requests": num_requests
    }  # fmt: skip
    eager, _ = make_llm(world, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", **settings)
    assert captured.engine.graph_report.num_graphs > 0
    assert eager.engine.graph_report.num_graphs == 0
    expected = eager.generate(REQUESTS)
    found = captured.generate(REQUESTS)
    assert ids_of(found) == ids_of(expected)
    assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert captured.engine.stats().num_device_rounds > 0
    captured.engine.check()


def test_poisoned_leftovers_shrinking_batches_and_context_edges(agreeing: World) -> None:
    settings = {"proposer": "eagle3", "num_speculative_tokens": 4, "max_num_requests": 6}
    eager, _ = make_llm(agreeing, is_eager=True, graphs="off", **settings)
    runners: list[Poisoned] = []

    def make_runner(round_: DeviceRound, config: RuntimeConfig) -> Poisoned:
        runners.append(Poisoned(round_, config))
        return runners[-1]

    captured, _ = make_llm(agreeing, make_runner=make_runner, **settings)
    expected = eager.generate(REQUESTS)
    found = captured.generate(REQUESTS)
    assert ids_of(found) == ids_of(expected)
    assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    accepted = eager.engine.stats().num_accepted_at
    assert min(accepted) > 0, "a draft that is never accepted at some depth shows nothing"
    assert {shape.context for shape in runners[0].shapes if not shape.is_split} == {32, 64, 128}
    assert {shape.batch for shape in runners[0].shapes} >= {1, 2, 4, 6}


class SpoiltAfterWarmUp:
    """Runs a round; what the first run of each shape left is overwritten before its capture."""

    def __init__(self, round_: DeviceRound) -> None:
        self.inner = round_
        self.state = round_.state
        self.split = None  # whole rounds are enough here
        self.prefill = None
        self.is_sparse = round_.is_sparse
        self.has_confidence = round_.has_confidence
        self._warm: set[RoundShape] = set()

    def run(self, shape: RoundShape) -> None:
        self.inner.run(shape)
        if shape in self._warm:  # this was the capture
            return
        self._warm.add(shape)
        state, entries = self.state, self.inner.draft._entries  # type: ignore[attr-defined]
        real = slice(0, state.padding_slot)
        for rows in (state.lengths_S, state.newest_ids_target_S, state.block_tables_ST):
            rows[real] = 10**6
        state.output_BX.fill_(-7)
        state.confidence_BG.fill_(float("nan"))
        entries._feedback_SH[real] = float("nan")
        entries._head_input_SH[real] = float("nan")


class CapturedAfterSpoiling(Poisoned):
    def __init__(self, round_: DeviceRound, config: RuntimeConfig) -> None:
        super().__init__(SpoiltAfterWarmUp(round_), config)  # type: ignore[arg-type]
        self.round = round_


def test_what_warm_up_left_reaches_no_answer(agreeing: World) -> None:
    settings = {"proposer": "eagle3", "num_speculative_tokens": 4, "max_num_requests": 6}
    eager, _ = make_llm(agreeing, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(agreeing, make_runner=CapturedAfterSpoiling, **settings)
    assert ids_of(captured.generate(REQUESTS)) == ids_of(eager.generate(REQUESTS))
    assert captured.engine.stats().num_device_rounds > 0


def restricted(*rules: Rule | None) -> list[RequestInput]:
    """Return requests with these grammars, greedy, drawn and drawn after filters in turn."""
    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=5),
        SamplingParams(temperature=1.1, top_k=30, top_p=0.9, seed=-6),
    )
    return [
        replace(
            REQUESTS[index],
            params=kinds[index % 3],
            ignore_eos=True,
            masks=None if rule is None else Grammar(rule),
        )
        for index, rule in enumerate(rules)
    ]


@pytest.mark.parametrize("verification", ["seeded", "rejection"])
@pytest.mark.parametrize(("proposer", "gamma"), [("none", 0), ("eagle3", 4)])
def test_split_rounds_equal_eager_ones(
    agreeing: World, proposer: str, gamma: int, verification: str
) -> None:
    """Beside whole rounds, with poisoned leftovers: drafts, masks and padding of other rounds."""
    settings = {
        "proposer": proposer,
        "num_speculative_tokens": gamma,
        "max_num_requests": 6,
        "verification": verification,
    }
    asked = restricted(parity, None, tens, parity, None, None, tens, parity, None)
    eager, _ = make_llm(agreeing, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(agreeing, is_eager=True, graphs="auto", **settings)
    expected, found = eager.generate(asked), captured.generate(asked)
    assert ids_of(found) == ids_of(expected)
    assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    for request, answer in zip(asked, found, strict=True):
        if isinstance(request.masks, Grammar):
            assert request.masks.accepts(answer.ids_target)
    assert captured.engine.stats().num_device_rounds > 0.5 * captured.engine.stats().num_steps
    captured.engine.check()
    if verification == "seeded":
        poisoned, _ = make_llm(agreeing, make_runner=Poisoned, **settings)
        assert ids_of(poisoned.generate(asked)) == ids_of(expected)


def test_others_run_on_while_masks_are_made(agreeing: World) -> None:
    settings = {"proposer": "eagle3", "num_speculative_tokens": 4, "max_num_requests": 4}
    asked = restricted(None, None, parity)
    eager, _ = make_llm(agreeing, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(agreeing, is_eager=True, graphs="auto", **settings)
    expected = ids_of(eager.generate(asked))
    slow = Slow(parity)
    ids: dict[str, tuple[int, ...]] = {}
    for request in (*asked[:2], replace(asked[2], masks=slow)):
        captured.engine.add_request(request)
    running = {request.request_id for request in asked}
    while running:
        for delta in captured.engine.step():
            ids[delta.request_id] = ids.get(delta.request_id, ()) + delta.ids_target
            if delta.finish_reason is not None:
                running.discard(delta.request_id)
        if running == {"r2"}:
            slow.may_go.set()
    assert ids == expected


def test_replay_after_flush_and_beside_sampled_requests(world: World) -> None:
    settings = {"proposer": "eagle3", "num_speculative_tokens": 3}
    eager, _ = make_llm(world, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", **settings)
    expected = ids_of(eager.generate(REQUESTS))
    for _ in range(3):
        assert ids_of(captured.generate(REQUESTS)) == expected
        captured.engine.flush_cache()
    sampled = RequestInput(
        request_id="sampled",
        prompt_ids_target=prompt_of(77, 9),
        params=SamplingParams(temperature=1.0, seed=3),
        max_tokens=9,
    )
    mixed = (*REQUESTS[:3], sampled, *REQUESTS[3:])
    assert ids_of(captured.generate(mixed)) == ids_of(eager.generate(mixed))


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("is_speculative", [False, True])
def test_smollm2_answers_are_the_eager_ones(
    tmp_path: Path, is_speculative: bool, concurrency: int
) -> None:
    manifest = real_model.write_manifest(tmp_path)
    prompts, _ = real_model.first_eight()

    def load(graphs: str) -> LLM:
        return LLM.from_manifest(
            manifest,
            Overrides(
                proposer="eagle3" if is_speculative else "none",
                device="cuda",
                max_num_requests=concurrency,
                graphs=graphs,
            ),
        )

    eager, captured = load("off"), load("auto")
    expected = real_model.answer(eager, prompts)
    found = real_model.answer(captured, prompts)
    assert ids_of(found) == ids_of(expected)
    assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    report = captured.engine.graph_report
    assert 0 < report.capture_s < 60


@pytest.mark.parametrize("kind", ["dspark", "dflash", "mtp", "eagle"])
def test_other_drafts_captured(tmp_path: Path, kind: str) -> None:
    if kind in ("dspark", "dflash"):
        markov: Literal["rnn"] | None = "rnn" if kind == "dspark" else None
        made = make_block_world(tmp_path, BlockCase(markov=markov))
    else:
        made = last_state_world(tmp_path, "mtp" if kind == "mtp" else "eagle")
    world = replace(made, models=load_tiny(made.manifest, device=CUDA, dtype=torch.bfloat16))
    settings = {"proposer": kind, "num_speculative_tokens": 4, "max_num_requests": 3}
    requests = [
        replace(request, num_speculative_tokens=4 - index % 3)
        for index, request in enumerate(REQUESTS)
    ]
    eager, _ = make_llm(world, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", **settings)
    expected, found = eager.generate(requests), captured.generate(requests)
    assert ids_of(found) == ids_of(expected)
    assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    assert captured.engine.stats().num_device_rounds > 0
