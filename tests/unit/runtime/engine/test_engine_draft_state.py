"""The draft's own state: context limit, chunked prefill, correction after every round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleProposer, OracleScript
from runtime.spec.types import SamplingParams
from tests.engine_harness import (
    Rig,
    World,
    draft_kv_from_scratch,
    drive,
    kv_rows,
    make_rig,
    make_world,
    prompt_of,
    reference_ids,
)

DRAFT_POSITIONS = 16


def test_drafting_stops_at_the_drafts_context_and_only_there(tmp_path: Path) -> None:
    """C025, C107: a draft of 16 positions under a target of 64, one long and one short request."""
    world = make_world(tmp_path, draft_positions=DRAFT_POSITIONS)
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=3, max_model_len=64))
    assert [found.code for found in rig.config.diagnostics] == ["SD808"]
    requests = [
        RequestInput(
            request_id=name,
            prompt_ids_target=prompt_of(seed, length),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for name, seed, length, max_tokens in (("long", 1, 12, 40), ("short", 2, 4, 10))
    ]
    answers = drive(rig, requests, arrivals={1: 6})
    for request in requests:
        wanted = reference_ids(world, request, max_model_len=64)
        assert answers[request.request_id].ids_target == wanted
    drafts = [entry for round_ in rig.proposer.proposals for entry in round_]
    assert all(length + len(ids) <= DRAFT_POSITIONS for _, length, ids in drafts if ids)
    assert any(ids for name, length, ids in drafts if name == "long")
    late = [round_ for round_ in rig.proposer.proposals if len(round_) == 2]
    assert any(not {name: ids for name, _, ids in round_}["long"] for round_ in late)
    assert all(
        ids for round_ in late for name, length, ids in round_ if name == "short" and length < 13
    )


def _assert_draft_kv_is_true(world: World, rig: Rig) -> int:
    """Compare every running request's draft KV with one made from its committed tokens."""
    num_checked = 0
    for request in rig.engine._scheduler.running:
        num_computed = request.placed.num_computed_tokens
        if num_computed >= len(request.ids_target):
            continue
        wanted = draft_kv_from_scratch(world, request.ids_target, num_computed)
        for found_layer, wanted_layer in zip(rig.draft_kv, wanted, strict=True):
            found = kv_rows(found_layer, request.placed.table.blocks, num_computed)
            assert torch.equal(found, kv_rows(wanted_layer, [0], num_computed))
        num_checked += 1
    return num_checked


@pytest.mark.parametrize("chunk", [24, 8, 7, 1])
def test_chunked_prefill_leaves_the_same_draft(world: World, chunk: int) -> None:
    """C115: the first proposals and the draft KV do not depend on how the prompt was cut."""
    request = RequestInput(
        request_id="a", prompt_ids_target=prompt_of(8, 24), max_tokens=12, ignore_eos=True
    )
    overrides = Overrides(proposer="eagle3", num_speculative_tokens=4)
    whole = make_rig(world, overrides)
    drive(whole, [request])
    rig = make_rig(
        world,
        Overrides(proposer="eagle3", num_speculative_tokens=4, prefill_chunk_size=chunk),
    )
    rig.engine.add_request(request)
    num_steps = 0
    while not any(delta.ids_target for delta in rig.engine.step()):
        num_steps += 1
        assert _assert_draft_kv_is_true(world, rig) == 1
    assert num_steps == -(-24 // chunk) - 1
    last_rows = [observation.last_row for observation in rig.proposer.observations]
    assert last_rows == [(-1,)] * num_steps + [((24 - 1) % chunk,)]
    assert _assert_draft_kv_is_true(world, rig) == 1
    rig.engine.step()
    assert rig.proposer.proposals[0] == whole.proposer.proposals[0]


@pytest.mark.parametrize("temperature_seed", [None, 3])
def test_draft_kv_is_corrected_after_every_round(
    world: World, temperature_seed: int | None
) -> None:
    """C027: after each of six rounds the draft KV is that of the committed tokens, bit for bit."""
    params = (
        SamplingParams()
        if temperature_seed is None
        else SamplingParams(temperature=1.0, seed=temperature_seed)
    )
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=4))
    for index in range(3):
        rig.engine.add_request(
            RequestInput(
                request_id=str(index),
                prompt_ids_target=prompt_of(30 + index, 5 + 4 * index),
                params=params,
                max_tokens=40,
                ignore_eos=True,
            )
        )
    num_checked = 0
    for _ in range(7):
        rig.engine.step()
        num_checked += _assert_draft_kv_is_true(world, rig)
    assert num_checked == 21


def test_partly_accepted_rounds_leave_a_true_draft_kv(world: World) -> None:
    """Drafts come from a script that forces every count; the EAGLE-3 draft watches."""
    request = RequestInput(
        request_id="a", prompt_ids_target=prompt_of(60, 6), max_tokens=30, ignore_eos=True
    )
    wanted = reference_ids(world, request)
    script = OracleScript(continuations={"a": wanted}, accept_counts=(0, 1, 2, 3, 4))
    oracle = OracleProposer(script, device=world.models.target.device)
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=4))
    rig.proposer.inner.propose = oracle.propose  # type: ignore[method-assign]
    rig.engine.add_request(request)
    ids: list[int] = []
    while rig.engine.has_work:
        ids.extend(token for delta in rig.engine.step() for token in delta.ids_target)
        _assert_draft_kv_is_true(world, rig)
    assert tuple(ids) == wanted
    assert rig.engine.stats().num_accepted_at[3] > 0
