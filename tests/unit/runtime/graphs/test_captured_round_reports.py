"""Field reports on captured rounds (T6): leftovers in buffers, full budgets, full memory, crowds.

The CPU's stand-in for graphs runs the same rounds over the same buffers; tests/gpu repeats what
only a device can show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from runtime.config import RuntimeConfig
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.graphs.capture import GraphReport
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.recorder import capture_what_fits
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape
from tests.engine_harness import World, prompt_of
from tests.fake_graph import FakeGraph, ids_of, make_llm

HUGE = 10**6
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 3 + 9 * (index % 5)),
        max_tokens=30 - 3 * index,
        ignore_eos=True,
    )
    for index in range(8)
)


@pytest.fixture(scope="module")
def answers(agreeing: World) -> dict[str, tuple[int, ...]]:
    llm, _ = make_llm(agreeing, is_eager=True, proposer="none")
    return ids_of(llm.generate(REQUESTS))


def spoil(round_: DeviceRound, slots: Sequence[int]) -> None:
    """Overwrite everything persistent of slots that no request has, and all outputs."""
    state, entries = round_.state, round_.draft._entries  # type: ignore[attr-defined]
    index = torch.tensor(slots, dtype=torch.int64)
    state.lengths_S[index] = HUGE
    state.newest_ids_target_S[index] = HUGE
    state.block_tables_ST[index] = HUGE
    state.output_BX.fill_(-HUGE)
    state.confidence_BG.fill_(float("nan"))
    for rows_SH in (entries._feedback_SH, entries._head_input_SH):
        rows_SH[index] = float("nan")


class Leftovers(FakeGraph):
    """Spoils the slots that a round does not run, and what a dry run of every shape left.

    Those of prompts that were just prefilled are spared: rounds of others may come first.
    """

    def __init__(self, round_: DeviceRound, config: RuntimeConfig) -> None:
        super().__init__(round_, config)
        self.coming: set[int] = set()
        for batch in self.batches:
            for context in self.contexts:
                round_.run(
                    RoundShape(batch=batch, num_drafts=self.draft_counts[-1], context=context)
                )
        spoil(round_, range(config.max_num_requests))

    def launch(self, shape: RoundShape, buffer: int) -> None:
        state = self.round.state
        used = set(state.slots_B.tolist())
        self.coming -= used
        kept = used | self.coming
        spoil(self.round, [s for s in range(state.padding_slot) if s not in kept])
        super().launch(shape, buffer)

    def launch_prefill(self, shape: PrefillShape) -> None:
        assert self.round.prefill is not None
        self.coming |= set(self.round.prefill.inputs_X[: shape.num_places].tolist())
        super().launch_prefill(shape)


def with_leftovers(world: World, **settings: object) -> tuple[LLM, list[Leftovers]]:
    made: list[Leftovers] = []

    def make(round_: DeviceRound, config: RuntimeConfig) -> Leftovers:
        made.append(Leftovers(round_, config))
        return made[-1]

    llm, _ = make_llm(world, make_runner=make, **settings)
    return llm, made


@pytest.mark.parametrize("max_num_requests", [1, 3, 5])
def test_leftovers_of_requests_and_dry_runs_reach_no_answer(
    agreeing: World, answers: dict[str, tuple[int, ...]], max_num_requests: int
) -> None:
    """C075, C081: batches shrink from long contexts to short ones, at every size around 1, 2, 4."""
    llm, (graph,) = with_leftovers(
        agreeing,
        proposer="eagle3",
        num_speculative_tokens=3,
        max_num_requests=max_num_requests,
        batch_buckets=(1, 2, 4),
    )
    assert ids_of(llm.generate(REQUESTS)) == answers
    llm.engine.flush_cache()
    assert ids_of(llm.generate(REQUESTS)) == answers
    assert llm.engine.stats().num_device_rounds > 0
    used = {shape.batch for shape in graph.shapes}
    assert max_num_requests in used
    assert max_num_requests == 1 or len(used) > 1


@pytest.mark.parametrize("budget", [15, 16])
def test_a_batch_that_fills_the_row_budget_with_its_drafts(
    agreeing: World, answers: dict[str, tuple[int, ...]], budget: int
) -> None:
    """C077: four requests of three drafts have sixteen rows; one less makes the eager path go."""
    llm, (graph,) = with_leftovers(
        agreeing,
        proposer="eagle3",
        num_speculative_tokens=3,
        max_num_requests=4,
        max_num_batched_tokens=budget,
        batch_buckets=(1, 2, 3),
    )
    assert ids_of(llm.generate(REQUESTS)) == answers
    assert (4 in {shape.batch for shape in graph.shapes}) is (budget >= 16)


def test_a_crowd_comes_and_leaves_in_disorder(agreeing: World) -> None:
    """C083: 32 requests at once, short, some of them aborted, for 200 steps and until they end."""
    chance = random.Random(7)
    requests = [
        replace(
            REQUESTS[0],
            request_id=f"c{number}",
            prompt_ids_target=prompt_of(300 + number, chance.randint(5, 20)),
            max_tokens=chance.randint(1, 30),
        )
        for number in range(44)
    ]
    plain, _ = make_llm(agreeing, is_eager=True, proposer="none", max_num_requests=32)
    expected = ids_of(plain.generate(requests))
    llm, (graph,) = with_leftovers(
        agreeing, proposer="eagle3", num_speculative_tokens=3, max_num_requests=32
    )
    engine, waiting = llm.engine, list(requests)
    found: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for _ in range(200):
        while waiting and engine.stats().num_running + engine.stats().num_waiting < 32:
            found[waiting[-1].request_id] = []
            engine.add_request(waiting.pop())
        if chance.random() < 0.4 and (running := engine._scheduler.running):
            victim = chance.choice(running).request_id
            if engine.abort(victim):
                aborted.add(victim)
        for delta in engine.step():
            found[delta.request_id].extend(delta.ids_target)
        if not waiting and not engine.has_work:
            break
    assert not engine.has_work
    engine.check()
    assert len(aborted) > 2
    for name, ids in found.items():
        wanted = expected[name]
        assert tuple(ids) == (wanted[: len(ids)] if name in aborted else wanted), name
    assert max(shape.batch for shape in graph.shapes) == 32
    assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks


SHAPES = [
    RoundShape(batch=batch, num_drafts=2, context=context)
    for batch in (8, 4, 2, 1)
    for context in (64, 32)
]


@pytest.mark.parametrize(
    ("full", "kept"),
    [((), {8, 4, 2, 1}), (((8, 64),), {4, 2, 1}), (((8, 64), (4, 32)), {2, 1})],
)
def test_sizes_for_which_memory_runs_out_are_left_out(
    full: tuple[tuple[int, int], ...], kept: set[int]
) -> None:
    """C079: a size has all its graphs or none; smaller ones are tried."""
    freed: list[None] = []

    def capture_one(shape: RoundShape) -> RoundShape:
        if (shape.batch, shape.context) in full:
            raise torch.OutOfMemoryError("no memory")
        return shape

    graphs = capture_what_fits(
        SHAPES, capture_one, size=lambda shape: shape.batch, on_full=lambda: freed.append(None)
    )
    assert {shape.batch for shape in graphs} == kept
    assert len(graphs) == 2 * len(kept)
    assert len(freed) == len(full)


def test_left_out_sizes_are_told_and_run_eagerly(
    agreeing: World, answers: dict[str, tuple[int, ...]]
) -> None:
    report = GraphReport(num_graphs=6, skipped_batches=(4,))
    (problem,) = report.problems()
    assert (problem.code, problem.severity) == ("SD841", "warning")
    assert "batches of 4" in problem.message
    assert GraphReport(num_graphs=8).problems() == ()
    (problem,) = GraphReport(num_graphs=6, skipped_prefill_rows=(128, 256)).problems()
    assert "prefill rows of 128, 256" in problem.message

    class Small(FakeGraph):
        def __init__(self, round_: DeviceRound, config: RuntimeConfig) -> None:
            super().__init__(round_, config)
            self.batches = tuple(size for size in self.batches if size < 4)

    made: list[Small] = []

    def make(round_: DeviceRound, config: RuntimeConfig) -> Small:
        made.append(Small(round_, config))
        return made[-1]

    llm, _ = make_llm(
        agreeing,
        make_runner=make,
        proposer="eagle3",
        num_speculative_tokens=3,
        prefill_buckets=(),  # prefills would change who runs together
    )
    assert ids_of(llm.generate(REQUESTS)) == answers
    assert {shape.batch for shape in made[0].shapes} == {1, 2}
