"""Engines with MTP and EAGLE-1 drafts: the target-only text, and a true draft KV, whatever happens.

The drafts agree with their target often, so that every count of accepted drafts occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides, resolve_config
from runtime.engine.request import RequestInput
from runtime.kv import KVLayer, KVPool
from runtime.spec.factory import DraftParts, make_proposer
from runtime.spec.packing import pack_rows
from runtime.spec.types import Observation, RequestView, SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import (
    Rig,
    World,
    drive,
    kv_rows,
    make_rig,
    prompt_of,
    reference_ids,
)
from tests.tiny_last_state import Kind, last_state_world
from tests.tiny_manifest import CPU

KINDS: tuple[tuple[Kind, int], ...] = (("mtp", 1), ("mtp", 3), ("eagle", 1))


@pytest.fixture(scope="module", params=KINDS, ids=lambda param: f"{param[0]}-{param[1]}")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    kind, num_layers = request.param
    return last_state_world(tmp_path_factory.mktemp("pair"), kind, num_layers=num_layers)


def settings(world: World, **given: int | bool) -> Overrides:
    assert world.manifest.draft is not None
    return Overrides(proposer=world.manifest.draft.algorithm, **given)  # type: ignore[arg-type]


def requests_of(*lengths: int, max_tokens: int = 24) -> list[RequestInput]:
    """Return greedy and sampled requests by turns."""
    return [
        RequestInput(
            request_id=str(index),
            prompt_ids_target=prompt_of(20 + index, length),
            params=SamplingParams(temperature=0.7 * (index % 2), seed=index),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for index, length in enumerate(lengths)
    ]


def draft_kv_from_scratch(
    world: World, ids_target: Sequence[int], num_positions: int
) -> tuple[KVLayer, ...]:
    """Compute the draft's KV of positions 0..num_positions - 1 in block 1, in one pass."""
    target, draft = world.models.target, world.models.draft
    assert draft is not None
    view = RequestView(
        request_id="scratch",
        slot=0,
        ids_target=ids_target,
        num_prompt_tokens=len(ids_target),
        params=SamplingParams(),
        block_table=(1,),
        num_drafts=0,
    )
    target_kv, draft_kv = (
        KVPool(
            model.kv_specs,
            num_blocks=2,
            kv_block_size=num_positions,
            dtype=torch.float32,
            device=CPU,
        ).layers
        for model in (target, draft)
    )
    parts = DraftParts(model=draft, kv=draft_kv, kv_block_size=num_positions, num_slots=1)
    proposer = make_proposer(draft.facts.algorithm, device=CPU, draft=parts)
    batch = pack_rows(
        [(0, position, ids_target[position]) for position in range(num_positions)],
        [view],
        kv_block_size=num_positions,
        device=CPU,
    )
    with torch.inference_mode():
        proposer.observe(
            Observation(
                batch=batch,
                next_ids_target_N=torch.tensor(list(ids_target[1 : num_positions + 1])),
                aux_hidden_N=None,
                views=(view,),
                last_row=(num_positions - 1,),
                final_hidden_NH=target.final_states(target.forward(batch, target_kv).hidden_ND),
            )
        )
    return draft_kv


def assert_draft_kv_is_true(world: World, rig: Rig) -> int:
    """Compare every decoding request's draft KV with one made from its committed tokens."""
    num_checked = 0
    for request in rig.engine._scheduler.running:
        num_computed = request.placed.num_computed_tokens
        if num_computed >= len(request.ids_target):
            continue
        wanted = draft_kv_from_scratch(world, request.ids_target, num_computed)
        for layer, (found, made) in enumerate(zip(rig.draft_kv, wanted, strict=True)):
            num_final = num_computed - layer  # a later layer waits for tokens that are not known
            if num_final > 0:
                rows = kv_rows(found, request.placed.table.blocks, num_final)
                assert torch.equal(rows, kv_rows(made, [1], num_final))
        num_checked += 1
    return num_checked


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_the_text_is_the_targets(world: World, gamma: int) -> None:
    draft = world.models.draft
    assert draft is not None
    if gamma > 3 and draft.facts.decoder.num_layers > 1:
        gamma = draft.facts.decoder.num_layers  # each layer makes one draft
    rig = make_rig(world, settings(world, num_speculative_tokens=gamma))
    requests = requests_of(5, 17, 9, 1)
    answers = drive(rig, requests, arrivals={2: 3, 3: 5})
    for request in requests:
        wanted = reference_ids(world, request)
        assert answers[request.request_id].ids_target == wanted
    stats = rig.engine.stats()
    assert all(stats.num_accepted_at[:2])
    assert stats.num_accepted_drafts < stats.num_drafts


def test_preempted_requests_give_the_same_text(world: World) -> None:
    rig = make_rig(world, settings(world, num_kv_blocks=9, max_model_len=56))
    requests = requests_of(14, 15, 16, max_tokens=20)
    answers = drive(rig, requests)
    assert rig.engine.stats().num_preemptions > 0
    for request in requests:
        wanted = reference_ids(world, request, max_model_len=56)
        assert answers[request.request_id].ids_target == wanted


def test_the_draft_kv_of_a_reused_prefix_is_true(world: World) -> None:
    """Blocks of the first request serve the second, whose prompt goes on from its text."""
    rig = make_rig(world, settings(world, num_speculative_tokens=3))
    first = requests_of(19)[0]
    text = drive(rig, [first])["0"].ids_target
    prompt = (*first.prompt_ids_target, *text, 9, 8)
    second = RequestInput(
        request_id="again", prompt_ids_target=prompt, max_tokens=16, ignore_eos=True
    )
    rig.engine.add_request(second)
    ids: list[int] = []
    num_checked = 0
    while rig.engine.has_work:
        ids += [token for delta in rig.engine.step() for token in delta.ids_target]
        num_checked += assert_draft_kv_is_true(world, rig)
    assert rig.engine.stats().num_cached_tokens >= 32
    assert tuple(ids) == reference_ids(world, second)
    assert num_checked > 3


@pytest.mark.parametrize("chunk", [24, 7, 1])
def test_chunked_prefill_leaves_the_same_draft(world: World, chunk: int) -> None:
    request = requests_of(24)[0]
    whole = make_rig(world, settings(world, num_speculative_tokens=3))
    drive(whole, [request])
    rig = make_rig(world, settings(world, num_speculative_tokens=3, prefill_chunk_size=chunk))
    rig.engine.add_request(request)
    while not any(delta.ids_target for delta in rig.engine.step()):
        assert_draft_kv_is_true(world, rig)
    assert assert_draft_kv_is_true(world, rig) == 1
    rig.engine.step()
    assert rig.proposer.proposals[0] == whole.proposer.proposals[0]


def test_several_layers_refuse_more_drafts_than_layers(tmp_path: Path) -> None:
    world = last_state_world(tmp_path, "mtp", num_layers=2)
    assert world.manifest.geometry.num_speculative_tokens == 3
    with pytest.raises(DiagnosticError) as raised:
        resolve_config(world.manifest, Overrides(device="cpu", max_model_len=64))
    assert [(d.code, d.found) for d in raised.value.diagnostics] == [("SD806", "3")]
    settled = resolve_config(
        world.manifest, Overrides(device="cpu", max_model_len=64, num_speculative_tokens=2)
    )
    assert settled.num_speculative_tokens == 2
