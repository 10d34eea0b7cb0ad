"""A block draft inside a round without host reads: `BlockProposer.propose`, greedy, on the device.

Every request gets a block as wide as the round's; slots beyond a request's own drafts are computed
and nobody sees them, because rows attend up to the end of their own block.

Legend: B requests, G drafts of the round, W slots of a block, C of them, N rows of slots, H draft
hidden, R draft vocabulary, M rank of the Markov head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from runtime.batch import PreparedBatch, RoundRequests, packed
from runtime.kernels.block_rows import place_blocks
from runtime.kv import KVLayer
from runtime.models import BlockModel, BlockRows
from runtime.models.block_heads import Markov
from runtime.spec.draft_choice import DraftHead, choose_round_drafts

_LOGITS_BYTES = 1 << 28
"""Most bytes of base logits at once, or those of one slot: graphs keep what they compute."""


def block_states(
    model: BlockModel, kv: Sequence[KVLayer], requests: RoundRequests, num_drafts: int
) -> torch.Tensor:
    """Return the normed states [B, W, H] of the blocks behind the requests' contexts.

    Sync: none.
    """
    width = num_drafts + model.first_slot
    places = place_blocks(
        requests.lengths_B,
        requests.newest_ids_target_B,
        requests.num_drafts_B,
        requests.kv_slots_BW,
        width=width,
        first_slot=model.first_slot,
        mask_id_target=model.mask_id_target,
    )
    batch = PreparedBatch(
        ids_target_N=places.ids_target_N,
        positions_N=places.positions_N,
        slots_N=places.kv_slots_N,
        row_request_N=places.row_request_N,
        block_tables_BT=requests.block_tables_BT,
        max_length=requests.max_length,
        rows_per_request=width,
        arrivals_X=requests.arrivals_X,
    )
    rows = BlockRows(batch=batch, anchors_N=places.anchors_N, ends_N=places.ends_N)
    return model.forward(rows, kv).view(requests.slots_B.shape[0], width, -1)


def read_block(
    model: BlockModel, chooser: DraftHead, hidden_BWH: torch.Tensor, requests: RoundRequests
) -> torch.Tensor | None:
    """Read the heads of a block; drafts are in `requests.drafts_BG`.

    What does not wait for a draft is computed for all slots at once: `BlockProposer.propose` reads
    the same heads slot by slot, and a row has its bits whatever rows are beside it.

    Args:
        model: the draft.
        chooser: reads finished logits.
        hidden_BWH: from `block_states`.
        requests: of the round.

    Returns:
        Log odds [B, G] of the confidence head, None without one.

    Sync: none.
    """
    hidden_BGH = hidden_BWH[:, model.first_slot :].contiguous()
    if requests.sampling is not None or model.selector is not None:
        state_BM = _first_state(model, hidden_BWH, requests)
        _choose_in_turn(model, chooser, hidden_BGH, state_BM, requests)
    elif model.markov is not None:
        state_BM = None if model.markov.is_plain else _first_state(model, hidden_BWH, requests)
        _choose_best_in_turn(model, model.markov, hidden_BGH, state_BM, requests)
    else:
        best_N = model.best_ids(hidden_BGH.flatten(0, 1))
        requests.drafts_BG.copy_(best_N.view(requests.drafts_BG.shape))
    if model.confidence is None:
        return None
    previous_NM = None
    if model.confidence.reads_markov:
        assert model.markov is not None, "the confidence head reads the Markov embedding"
        previous_NM = model.markov.embed(packed(requests.ids_target_BW[:, :-1]))
    odds_N = model.confidence.logits(hidden_BGH.flatten(0, 1), previous_NM)
    return odds_N.view(requests.drafts_BG.shape)


def _first_state(
    model: BlockModel, hidden_BWH: torch.Tensor, requests: RoundRequests
) -> torch.Tensor | None:
    """Return the state of the Markov head before the first predicting slot."""
    if model.markov is None:
        return None
    newest_B = requests.newest_ids_target_B
    state_BM = model.markov.initial_state(newest_B.shape[0])
    if model.first_slot and model.markov.is_recurrent:
        state_BM = model.markov.step(newest_B, hidden_BWH[:, 0], state_BM).state_BM
    return state_BM


def _choose_in_turn(
    model: BlockModel,
    chooser: DraftHead,
    hidden_BGH: torch.Tensor,
    state_BM: torch.Tensor | None,
    requests: RoundRequests,
) -> None:
    """Choose the drafts slot by slot, each fed the id before it."""
    previous_B = requests.newest_ids_target_B
    for j, logits_BR in enumerate(_base_logits(model, hidden_BGH)):
        hidden_BH = hidden_BGH[:, j]
        if model.markov is not None and state_BM is not None:
            step = model.markov.step(previous_B, hidden_BH, state_BM)
            state_BM = step.state_BM
            logits_BR = logits_BR + model.markov.bias(step.features_BM)
        logits_BR = model.select(logits_BR, previous_B, hidden_BH)
        previous_B = choose_round_drafts(chooser, logits_BR, requests, draft_index=j)


def _choose_best_in_turn(
    model: BlockModel,
    markov: Markov,
    hidden_BGH: torch.Tensor,
    state_BM: torch.Tensor | None,
    requests: RoundRequests,
) -> None:
    """Choose what `_choose_in_turn` does where every request is greedy: no correction is kept."""
    previous_B, features_BM = requests.newest_ids_target_B, None
    for j, logits_BR in enumerate(_base_logits(model, hidden_BGH)):
        if state_BM is not None:
            step = markov.step(previous_B, hidden_BGH[:, j], state_BM)
            state_BM, features_BM = step.state_BM, step.features_BM
        previous_B = markov.best_ids(
            logits_BR,
            features_BM,
            previous_B,
            names_R=model.draft_to_target_R,
            copy_B=requests.drafts_BG[:, j],
        )


def _base_logits(model: BlockModel, hidden_BGH: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the base logits [B, R] of one slot after the other, by products of as many as fit."""
    num_requests, num_drafts, _ = hidden_BGH.shape
    slot_bytes = 4 * num_requests * model.draft_to_target_R.shape[0]
    count = max(1, _LOGITS_BYTES // slot_bytes)
    for first in range(0, num_drafts, count):
        part_BCH = hidden_BGH[:, first : first + count]
        logits_NR = model.base_logits(part_BCH.flatten(0, 1))
        yield from logits_NR.view(num_requests, part_BCH.shape[1], -1).unbind(1)
