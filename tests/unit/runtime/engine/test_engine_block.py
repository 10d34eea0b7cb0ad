"""Block drafts in the engine: no token changes, whatever the heads, the anchor and the pressure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.block import BlockProposer
from runtime.spec.oracle import OracleProposer, OracleScript
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import (
    Rig,
    World,
    draft_kv_from_scratch,
    drive,
    kv_rows,
    make_rig,
    prompt_of,
    reference_ids,
)
from tests.tiny_block import BlockCase, make_block_world

CASES = [
    BlockCase(),
    BlockCase(sample_from_anchor=False),
    BlockCase(markov="gated"),
    BlockCase(markov="gated", sample_from_anchor=False, draft_vocab_size=None),
    BlockCase(markov="rnn", has_own_embedding=True),
    BlockCase(markov="rnn", sample_from_anchor=False),
    BlockCase(sliding_window=6),
    BlockCase(markov=None, sample_from_anchor=False),
    BlockCase(markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None),
    BlockCase(markov=None, sample_from_anchor=False, draft_vocab_size=None, sliding_window=6),
]
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=12),
    SamplingParams(presence_penalty=1.5, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=11),
)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 9 * index),
        params=params,
        max_tokens=24,
        ignore_eos=True,
    )
    for index, params in enumerate(PARAMS)
)


def name_of(case: BlockCase) -> str:
    parts = [case.markov or case.algorithm, "anchor" if case.sample_from_anchor else "bonus"]
    parts += ["full"] * (case.draft_vocab_size is None) + ["window"] * bool(case.sliding_window)
    return "-".join(parts)


@pytest.fixture(scope="module")
def block_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The variant with the most state: recurrent head, slot 0 not sampled."""
    case = BlockCase(markov="rnn", sample_from_anchor=False)
    return make_block_world(tmp_path_factory.mktemp("block"), case)


@pytest.fixture(scope="module")
def expected(block_world: World) -> dict[str, tuple[int, ...]]:
    """The same for all cases: they share the target."""
    return {request.request_id: reference_ids(block_world, request) for request in REQUESTS}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_block_draft_changes_no_token(
    tmp_path: Path, expected: dict[str, tuple[int, ...]], case: BlockCase
) -> None:
    world = make_block_world(tmp_path, case)
    rig = make_rig(world, Overrides())
    geometry = world.manifest.geometry
    width = case.block_size - (not case.sample_from_anchor)
    assert (rig.config.num_speculative_tokens, rig.config.draft_width) == (
        width,
        geometry.draft_width,
    )
    assert (geometry.draft_width, geometry.verify_width) == (case.block_size, width + 1)
    answers = drive(rig, REQUESTS, arrivals={1: 1, 2: 3, 3: 4})
    assert {name: answer.ids_target for name, answer in answers.items()} == expected
    stats = rig.engine.stats()
    assert stats.num_drafts > 0
    if case.markov is not None:
        assert all(count > 0 for count in stats.num_accepted_at[:3])


@pytest.mark.parametrize(
    "case",
    [
        BlockCase(markov="rnn", sample_from_anchor=False),
        BlockCase(markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None),
    ],
    ids=name_of,
)
def test_a_block_is_the_same_alone_and_among_others(tmp_path: Path, case: BlockCase) -> None:
    world = make_block_world(tmp_path, case)
    found = []
    for num_requests in (1, 4):
        rig = make_rig(world, Overrides(max_num_requests=num_requests))
        drive(rig, REQUESTS)
        found.append({entry for round_ in rig.proposer.proposals for entry in round_})
    assert found[0] == found[1]
    assert len({ids for _, _, ids in found[0]}) > 20


@pytest.mark.parametrize(
    "case",
    [
        BlockCase(markov="rnn"),
        BlockCase(markov="gated", sample_from_anchor=False),
        BlockCase(markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None),
    ],
    ids=name_of,
)
def test_bfloat16_changes_no_token(tmp_path: Path, case: BlockCase) -> None:
    world = make_block_world(tmp_path, case, dtype=torch.bfloat16)
    rig = make_rig(world, Overrides())
    answers = drive(rig, REQUESTS)
    for request in REQUESTS:
        assert answers[request.request_id].ids_target == reference_ids(world, request)
    assert rig.engine.stats().num_drafts > 0


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("num_kv_blocks", [9, 64])
def test_fewer_drafts_preemption_and_prefix_reuse(
    block_world: World, expected: dict[str, tuple[int, ...]], num_kv_blocks: int, gamma: int
) -> None:
    rig = make_rig(
        block_world,
        Overrides(
            num_speculative_tokens=gamma,
            num_kv_blocks=num_kv_blocks,
            max_model_len=56,
            max_num_batched_tokens=20,
            prefill_chunk_size=7,
        ),
    )
    first = drive(rig, REQUESTS, arrivals={1: 1, 2: 2, 3: 5})
    assert {name: answer.ids_target for name, answer in first.items()} == expected
    again = [drive(rig, REQUESTS[3:])["r3"] for _ in range(2)]
    assert {answer.ids_target for answer in again} == {expected["r3"]}
    assert again[1].usage.num_cached_tokens == 24
    stats = rig.engine.stats()
    assert (stats.num_preemptions > 0) is (num_kv_blocks == 9)
    assert stats.num_free_kv_blocks == stats.num_kv_blocks == num_kv_blocks - 1


def _assert_draft_kv_is_true(world: World, rig: Rig) -> int:
    """Compare every running request's draft KV with one made from its committed tokens."""
    num_checked = 0
    for request in rig.engine._scheduler.running:
        num_computed = request.placed.num_computed_tokens
        wanted = draft_kv_from_scratch(world, request.ids_target, num_computed)
        for found_layer, wanted_layer in zip(rig.draft_kv, wanted, strict=True):
            found = kv_rows(found_layer, request.placed.table.blocks, num_computed)
            assert torch.equal(found, kv_rows(wanted_layer, [0], num_computed))
        num_checked += 1
    return num_checked


def test_no_block_leaves_its_keys_behind(
    block_world: World, expected: dict[str, tuple[int, ...]]
) -> None:
    """Every accepted count is forced; draft KV of final positions never holds a block's own."""
    request = REQUESTS[0]
    script = OracleScript(continuations={"r0": expected["r0"]}, accept_counts=(0, 1, 2, 3, 4))
    oracle = OracleProposer(script, device=block_world.models.target.device)
    rig = make_rig(block_world, Overrides(prefill_chunk_size=5))
    inner = rig.proposer.inner
    assert isinstance(inner, BlockProposer)
    draft = inner.propose

    def propose(views):  # type: ignore[no-untyped-def]
        draft(views)  # writes its block into the slots that observe must correct
        return oracle.propose(views)

    inner.propose = propose  # type: ignore[method-assign]
    rig.engine.add_request(replace(request, request_id="r0"))
    ids: list[int] = []
    num_checked = 0
    while rig.engine.has_work:
        ids.extend(token for delta in rig.engine.step() for token in delta.ids_target)
        num_checked += _assert_draft_kv_is_true(block_world, rig)
    assert tuple(ids) == expected["r0"]
    assert num_checked > 5
    assert rig.engine.stats().num_accepted_at[3] > 0


def test_drafting_stops_at_the_drafts_context(tmp_path: Path) -> None:
    case = BlockCase(sample_from_anchor=False, max_position_embeddings=16)
    world = make_block_world(tmp_path, case)
    rig = make_rig(world, Overrides(max_model_len=48))
    assert [found.code for found in rig.config.diagnostics] == ["SD808"]
    request = replace(REQUESTS[1], max_tokens=30)
    assert drive(rig, [request])["r1"].ids_target == reference_ids(world, request)
    drafts = [entry for round_ in rig.proposer.proposals for entry in round_]
    assert any(ids for _, _, ids in drafts)
    assert all(length + len(ids) <= 16 for _, length, ids in drafts if ids)


def test_more_drafts_than_the_block_holds_are_refused(block_world: World) -> None:
    with pytest.raises(DiagnosticError) as raised:
        make_rig(block_world, Overrides(num_speculative_tokens=5))
    assert {d.code for d in raised.value.diagnostics} == {"SD806"}


def test_confidence_is_kept_for_each_slot_until_it_is_released(block_world: World) -> None:
    rig = make_rig(block_world, Overrides())
    inner = rig.proposer.inner
    assert isinstance(inner, BlockProposer)
    rig.engine.add_request(replace(REQUESTS[0], max_tokens=8))
    rig.engine.step()
    assert torch.equal(inner.confidence_SG, torch.ones_like(inner.confidence_SG))
    rig.engine.step()
    (slot,) = [request.placed.slot for request in rig.engine._scheduler.running]
    known = inner.confidence_SG[slot]
    assert bool(((known > 0) & (known < 1)).all())
    while rig.engine.has_work:
        rig.engine.step()
    assert torch.equal(inner.confidence_SG, torch.ones_like(inner.confidence_SG))
