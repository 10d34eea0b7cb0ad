"""One round of a block draft twice: eagerly, heads read slot by slot, and as on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runtime.engine.slot_params import round_kind, slot_sampling
from runtime.graphs.state import RoundShape, RoundState, SlotRow
from runtime.kv import KVPool
from runtime.models import BlockModel
from runtime.models.block_heads import Confidence
from runtime.spec.block import BlockProposer
from runtime.spec.packing import pack_rows
from runtime.spec.types import RequestView, SamplingParams
from tests.engine_harness import World, prompt_of
from tests.fake_graph import contiguous_batches

BLOCK = 4
BLOCKS_EACH = 8
NUM_PADDING = 1
"""Requests of a round on the device that are padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafted:
    """What a round left.

    Args:
        drafts_BG: of each request; 0 beyond its own.
        chances_SG: all of `confidence_SG`.
        log_q_BGR: laws of the drafts, or None.
    """

    drafts_BG: torch.Tensor
    chances_SG: torch.Tensor
    log_q_BGR: torch.Tensor | None


def model_of(world: World, confidence: str) -> BlockModel:
    """Return the draft with another confidence head: its "own", "none" or one of "states"."""
    model = world.models.draft
    assert isinstance(model, BlockModel)
    if confidence == "own":
        return model
    width = model.norm_H.shape[0]
    states = Confidence(
        weight=model.norm_H.new_tensor([[(7 * k % 11 - 5) / 16 for k in range(width)]]),
        bias=model.norm_H.new_tensor([0.125]),
        reads_markov=False,
    )
    return replace(model, confidence=states if confidence == "states" else None)


def views_of(params: Sequence[SamplingParams], counts: Sequence[int]) -> tuple[RequestView, ...]:
    """Return requests of several lengths in slots of their own, each wanting so many drafts."""
    return tuple(
        RequestView(
            request_id=f"r{index}",
            slot=len(counts) - 1 - index,
            ids_target=prompt_of(index, 3 + 5 * index),
            num_prompt_tokens=3 + 5 * index,
            params=one,
            block_table=[1 + BLOCKS_EACH * index + k for k in range(BLOCKS_EACH)],
            num_drafts=count,
        )
        for index, (one, count) in enumerate(zip(params, counts, strict=True))
    )


def observed(model: BlockModel, views: Sequence[RequestView]) -> BlockProposer:
    """Return a proposer whose cache holds the contexts of the views."""
    device, dtype = model.norm_H.device, model.norm_H.dtype
    pool = KVPool(
        model.kv_specs,
        num_blocks=1 + max(max(view.block_table) for view in views),
        kv_block_size=BLOCK,
        dtype=dtype,
        device=device,
    )
    rows = [
        (b, position, view.ids_target[position])
        for b, view in enumerate(views)
        for position in range(len(view.ids_target) - 1)
    ]
    states = torch.cat([_states_of(model, view) for view in views]).to(device=device, dtype=dtype)
    batch = pack_rows(rows, views, kv_block_size=BLOCK, device=device)
    model.write_context(batch, states, pool.layers)
    return BlockProposer(model, pool.layers, kv_block_size=BLOCK, num_slots=len(views) + 1)


def _states_of(model: BlockModel, view: RequestView) -> torch.Tensor:
    """Return made-up target states of a request's context."""
    width = len(model.facts.aux_layer_ids or ()) * model.facts.target_hidden_size
    generator = torch.Generator().manual_seed(view.block_table[0])
    return torch.randn((len(view.ids_target) - 1, width), generator=generator)


def drafted_eagerly(model: BlockModel, views: Sequence[RequestView]) -> Drafted:
    """Draft with `propose`."""
    proposer = observed(model, views)
    proposal = proposer.propose(views)
    return Drafted(
        drafts_BG=proposal.ids_target_BG,
        chances_SG=proposer.confidence_SG,
        log_q_BGR=None if proposal.q is None else proposal.q.log_q_BGR,
    )


def drafted_in_a_round(model: BlockModel, views: Sequence[RequestView]) -> Drafted:
    """Draft with `draft_round`, beside requests that are padding."""
    proposer, state = observed(model, views), round_state(model, views)
    shape = RoundShape(
        batch=len(views) + NUM_PADDING,
        num_drafts=max(view.num_drafts for view in views),
        context=BLOCK * BLOCKS_EACH,
        kind=round_kind([view.params for view in views]),
    )
    requests = state.requests(shape)
    with contiguous_batches():
        proposer.draft_round(requests)
    places = torch.arange(shape.num_drafts, device=state.device)
    is_own = places < requests.num_drafts_B[: len(views), None]
    laws = None
    if requests.laws is not None:
        laws = torch.stack(requests.laws.log_q, dim=1)[: len(views)]
    return Drafted(
        drafts_BG=torch.where(is_own, requests.drafts_BG[: len(views)], 0),
        chances_SG=proposer.confidence_SG,
        log_q_BGR=laws,
    )


def round_state(model: BlockModel, views: Sequence[RequestView]) -> RoundState:
    """Return the state of the rounds of these requests and padding."""
    state = RoundState(
        num_slots=len(views),
        max_batch=len(views) + NUM_PADDING,
        max_drafts=model.max_drafts,
        max_length=BLOCK * BLOCKS_EACH,
        kv_block_size=BLOCK,
        device=model.norm_H.device,
    )
    state.write_requests(
        [
            SlotRow(
                slot=view.slot,
                length=len(view.ids_target) - 1,
                newest_id_target=view.ids_target[-1],
                blocks=view.block_table,
                sampling=slot_sampling(view.params),
            )
            for view in views
        ]
    )
    state.write_batch([view.slot for view in views], [view.num_drafts for view in views])
    return state


def assert_drafted_alike(model: BlockModel, views: Sequence[RequestView]) -> Drafted:
    """Compare both rounds bit for bit; return what the one on the device left."""
    with torch.inference_mode():
        expected, found = drafted_eagerly(model, views), drafted_in_a_round(model, views)
    assert torch.equal(found.drafts_BG, expected.drafts_BG)
    assert torch.equal(found.chances_SG, expected.chances_SG)
    if expected.log_q_BGR is not None:
        assert found.log_q_BGR is not None
        for b, view in enumerate(views):
            count = view.num_drafts if view.params.is_rejection else 0
            assert torch.equal(found.log_q_BGR[b, :count], expected.log_q_BGR[b, :count])
    return found
