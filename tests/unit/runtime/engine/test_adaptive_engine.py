"""However many drafts each request gets, by wish or by choice, the tokens are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from runtime.config import Overrides, resolve_config
from runtime.config.cost_table import CostTable
from runtime.config.round_sizes import RoundMenu, draft_counts_up_to
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world, make_llm
from tests.linear_costs import linear_costs
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

GAMMA = 8
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(60 + index, 3 + 4 * index),
        max_tokens=14 + index,
        ignore_eos=True,
        num_speculative_tokens=(8, 3, 6, 1, 5)[index],
    )
    for index in range(5)
)
FREE = tuple(replace(request, num_speculative_tokens=None) for request in REQUESTS)
COSTS = linear_costs(
    RoundMenu(batches=(1, 2, 4), draft_counts=draft_counts_up_to(GAMMA)),
    draft_s=0.02,
    row_s=0.03,
)


def _world(kind: str, folder: Path) -> World:
    if kind == "dspark":
        return make_block_world(folder, BlockCase(block_size=GAMMA))
    if kind == "dspark-slot-0-silent":
        case = BlockCase(markov="rnn", sample_from_anchor=False, block_size=GAMMA + 1)
        return make_block_world(folder, case)
    if kind in ("mtp", "eagle"):
        return last_state_world(folder, "mtp" if kind == "mtp" else "eagle")
    if kind == "peagle":
        return parallel_world(folder)
    return make_agreeing_world(folder)


@pytest.fixture(
    scope="module",
    params=["eagle3", "mtp", "eagle", "peagle", "dspark", "dspark-slot-0-silent"],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return _world(request.param, tmp_path_factory.mktemp(request.param))


def _plain(world: World, requests: Sequence[RequestInput]) -> dict[str, tuple[int, ...]]:
    llm, _ = make_llm(world, is_eager=True, proposer="none")
    plain = [replace(request, num_speculative_tokens=None) for request in requests]
    return ids_of(llm.generate(plain))


def _usages(answers: Sequence[Completion]) -> list[object]:
    return [structs.replace(answer.usage, num_cached_tokens=0) for answer in answers]


def _llm(world: World, *, is_eager: bool = False, **settings: Any) -> LLM:
    assert world.manifest.draft is not None
    given = {"proposer": world.manifest.draft.algorithm, "num_speculative_tokens": GAMMA}
    llm, _ = make_llm(world, is_eager=is_eager, **(given | settings))
    return llm


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, tuple[int, ...]]:
    return _plain(world, FREE)


@pytest.fixture(scope="module")
def agreed(agreeing: World) -> dict[str, tuple[int, ...]]:
    return _plain(agreeing, FREE)


def test_each_request_has_its_own_number_of_drafts(
    world: World, expected: dict[str, tuple[int, ...]]
) -> None:
    """Drawn from 1 to 8, in one batch; rounds on the device and eager ones agree."""
    eager, ahead = (_llm(world, is_eager=is_eager) for is_eager in (True, False))
    first, second = eager.generate(REQUESTS), ahead.generate(REQUESTS)
    assert ids_of(first) == ids_of(second) == expected
    assert _usages(first) == _usages(second)
    for request, answer in zip(REQUESTS, second, strict=True):
        assert request.num_speculative_tokens is not None
        assert answer.usage.num_drafts <= request.num_speculative_tokens * answer.usage.num_rounds
    stats = ahead.engine.stats()
    assert stats.num_device_rounds > 0
    assert stats.rounds_by_drafts == eager.engine.stats().rounds_by_drafts
    assert set(stats.rounds_by_drafts) == {1, 3, 5, 6, 8}


@pytest.mark.parametrize("is_eager", [True, False])
def test_chosen_numbers_change_no_token(
    world: World, expected: dict[str, tuple[int, ...]], is_eager: bool
) -> None:
    llm = _llm(world, is_eager=is_eager, length_mode="compact", costs=COSTS)
    answers = llm.generate(FREE)
    assert ids_of(answers) == expected
    stats = llm.engine.stats()
    assert sum(stats.rounds_by_drafts.values()) == stats.num_rounds
    assert len(stats.rounds_by_drafts) > 1


def test_equal_histories_give_equal_rounds_and_sampled_requests_choose_too(
    agreeing: World,
) -> None:
    sampled = [
        replace(request, params=SamplingParams(temperature=0.9, seed=index))
        for index, request in enumerate(FREE[:3])
    ]
    found = []
    for _ in range(2):
        llm = _llm(agreeing, length_mode="compact", costs=COSTS)
        assert ids_of(llm.generate(sampled)) == _plain(agreeing, sampled)
        found.append((_usages(llm.generate(FREE)), llm.engine.stats().rounds_by_drafts))
    assert found[0] == found[1]


def test_packed_rounds_run_and_verify_fewer_rows(
    agreeing: World, agreed: dict[str, tuple[int, ...]]
) -> None:
    rows = {}
    for mode in ("static", "cap-accept", "compact"):
        llm, (graph,) = make_llm(
            agreeing,
            proposer="eagle3",
            num_speculative_tokens=GAMMA,
            length_mode=mode,
            costs=COSTS,
        )
        assert ids_of(llm.generate(FREE)) == agreed
        rows[mode] = sum(shape.num_rows for shape in graph.shapes) / len(graph.shapes)
        packed = [shape for shape in graph.shapes if shape.num_packed_rows is not None]
        assert bool(packed) == (mode == "compact")
        counts = {shape.num_drafts for shape in graph.shapes}
        assert (len(counts) > 1) == (mode == "compact")
        assert counts <= set(graph.draft_counts)
    assert rows["compact"] < min(rows["static"], rows["cap-accept"])


def test_cap_accept_commits_no_more_than_was_chosen(agreeing: World) -> None:
    """Drafts that are all right: each round accepts exactly as many as it may."""
    continuations = {
        answer.request_id: answer.ids_target
        for answer in make_llm(agreeing, is_eager=True, proposer="none")[0].generate(
            [replace(request, max_tokens=40) for request in FREE[:2]]
        )
    }
    dear = linear_costs(
        RoundMenu(batches=(1, 2, 4), draft_counts=draft_counts_up_to(GAMMA)), draft_s=50.0
    )
    for costs in (COSTS, dear):
        llm, _ = make_llm(
            agreeing,
            is_eager=True,
            proposer="oracle",
            num_speculative_tokens=GAMMA,
            script=OracleScript(continuations=continuations),
            length_mode="cap-accept",
            costs=costs,
        )
        answers = llm.generate(FREE[:2])
        for answer in answers:
            wanted = continuations[answer.request_id]
            assert answer.ids_target == wanted[: len(answer.ids_target)]
            assert answer.usage.num_accepted_drafts == answer.usage.num_drafts
        stats = llm.engine.stats()
        assert (max(stats.rounds_by_drafts) == 0) == (costs is dear)
        assert stats.num_rows > stats.num_drafts + stats.num_rounds


@pytest.mark.parametrize(
    "counts",
    [(0,), (GAMMA,), (GAMMA, 0), (1, 3, 0, 7, 2, 8), (4, 4, 4, 4, 0, 0, 0, 0)],
)
def test_adversarial_acceptance(
    agreeing: World, agreed: dict[str, tuple[int, ...]], counts: tuple[int, ...]
) -> None:
    """Acceptance that turns as soon as it was learnt."""
    for is_eager, mode in ((True, "compact"), (True, "cap-accept"), (False, "compact")):
        llm, graphs = make_llm(
            agreeing,
            is_eager=is_eager,
            proposer="oracle",
            num_speculative_tokens=GAMMA,
            script=OracleScript(continuations=dict(agreed), accept_counts=counts),
            length_mode=mode,
            costs=COSTS,
        )
        assert ids_of(llm.generate(FREE)) == agreed
        assert is_eager or graphs


def test_ngram_drafts_are_chosen_too(agreeing: World) -> None:
    loops = [
        replace(request, prompt_ids_target=prompt_of(7, 5) * 3) if index % 2 else request
        for index, request in enumerate(FREE)
    ]
    llm, _ = make_llm(
        agreeing,
        is_eager=True,
        proposer="ngram",
        num_speculative_tokens=GAMMA,
        length_mode="compact",
        costs=COSTS,
    )
    assert ids_of(llm.generate(loops)) == _plain(agreeing, loops)
    fixed, _ = make_llm(agreeing, is_eager=True, proposer="ngram", num_speculative_tokens=GAMMA)
    assert ids_of(fixed.generate(REQUESTS)) == _plain(agreeing, REQUESTS)


def test_preemption_and_lack_of_blocks(agreeing: World, agreed: dict[str, tuple[int, ...]]) -> None:
    llm, _ = make_llm(
        agreeing,
        proposer="eagle3",
        num_speculative_tokens=GAMMA,
        length_mode="compact",
        costs=COSTS,
        num_kv_blocks=8,
        max_model_len=48,
        prefill_buckets=(),  # prompts that are prefilled alone come and go without a preemption
    )
    assert ids_of(llm.generate(FREE)) == agreed
    assert llm.engine.stats().num_preemptions > 0
    llm.engine.check()


def test_costly_drafts_are_given_up_and_tried_again(agreeing: World) -> None:
    menu = RoundMenu(batches=(1, 2, 4), draft_counts=draft_counts_up_to(GAMMA))
    dear: CostTable = linear_costs(menu, draft_s=50.0)
    long = [replace(FREE[0], max_tokens=90)]
    llm = _llm(agreeing, length_mode="compact", costs=dear)
    assert ids_of(llm.generate(long)) == _plain(agreeing, long)
    found = llm.engine.stats().rounds_by_drafts
    assert set(found) == {0, 1}
    # A trial is in both rounds that are launched before its first outcome is read.
    assert 0 < found[1] <= 4


def test_modes_are_settings(agreeing: World) -> None:
    def codes(**given: Any) -> list[tuple[str, str]]:
        try:
            config = resolve_config(agreeing.manifest, Overrides(device="cpu", **given))
        except DiagnosticError as error:
            return [(item.code, item.where) for item in error.diagnostics]
        return [(item.code, item.where) for item in config.diagnostics]

    assert codes(length_mode="longest") == [("SD832", "--length-mode")]
    assert codes(length_mode="compact", proposer="none") == [("SD805", "--length-mode")]
    assert codes(cost_table="costs.json") == [("SD805", "--cost-table")]
    assert codes(length_mode="compact", cost_table="costs.json") == []
    config = resolve_config(
        agreeing.manifest, Overrides(device="cpu", length_mode="compact", cost_table="x.json")
    )
    assert (config.length_mode, config.cost_table) == ("compact", "x.json")


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_confidence_head_is_listened_to(
    tmp_path_factory: pytest.TempPathFactory, is_eager: bool
) -> None:
    """Its chances for the drafts that were verified are what the next choice goes by."""
    world = _world("dspark", tmp_path_factory.mktemp("confidence"))
    llm = _llm(world, is_eager=is_eager, length_mode="compact", costs=COSTS)
    for request in FREE[:2]:
        llm.engine.add_request(request)
    for _ in range(5):
        llm.engine.step()
    seen = [request.acceptance for request in llm.engine._scheduler.running]
    assert len(seen) == 2
    for acceptance in seen:
        assert acceptance.confidence
        assert all(0 < chance < 1 for chance in acceptance.confidence)


def test_a_row_budget_that_the_batch_fills_exactly(
    agreeing: World, agreed: dict[str, tuple[int, ...]]
) -> None:
    """Four requests with three drafts each are sixteen rows, and prefills want some, too."""
    for is_eager in (True, False):
        llm, _ = make_llm(
            agreeing,
            is_eager=is_eager,
            proposer="eagle3",
            num_speculative_tokens=3,
            max_num_batched_tokens=16,
            length_mode="compact",
            costs=COSTS,
        )
        assert ids_of(llm.generate(FREE)) == agreed
