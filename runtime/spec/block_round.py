"""A block draft inside a round without host reads: `BlockProposer.propose`, greedy, on the device.

Every request gets a block as wide as the round's; slots beyond a request's own drafts are computed
and nobody sees them, because rows attend up to the end of their own block.

Legend: B requests, G drafts of the round, W slots of a block, N = B W, H draft hidden, R draft
vocabulary, M rank of the Markov head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import RoundRequests, packed
from runtime.kv import KVLayer
from runtime.models import BlockModel, BlockRows
from runtime.spec.draft_choice import DraftHead, choose_round_drafts


def block_states(
    model: BlockModel, kv: Sequence[KVLayer], requests: RoundRequests, num_drafts: int
) -> torch.Tensor:
    """Return the normed states [B, W, H] of the blocks behind the requests' contexts.

    Sync: none.
    """
    num_requests, width = requests.slots_B.shape[0], num_drafts + model.first_slot
    ids_target_BW = requests.slots_B.new_full((num_requests, width), model.mask_id_target)
    ids_target_BW[:, 0] = requests.newest_ids_target_B
    # A request without drafts has a block of one slot, which nobody reads.
    own_widths_B = requests.num_drafts_B.clamp(min=1) + model.first_slot
    anchors_BW = requests.lengths_B[:, None].expand(num_requests, width)
    rows = BlockRows(
        batch=requests.batch(ids_target_BW),
        anchors_N=packed(anchors_BW),
        ends_N=packed(anchors_BW + (own_widths_B - 1)[:, None]),
    )
    return model.forward(rows, kv).view(num_requests, width, -1)


def read_block(
    model: BlockModel, chooser: DraftHead, hidden_BWH: torch.Tensor, requests: RoundRequests
) -> torch.Tensor | None:
    """Read the heads slot by slot, each fed the id before it; drafts are in `requests.drafts_BG`.

    Args:
        model: the draft.
        chooser: reads finished logits.
        hidden_BWH: from `block_states`.
        requests: of the round.

    Returns:
        Log odds [B, G] of the confidence head, None without one.

    Sync: none.
    """
    num_requests, width, _ = hidden_BWH.shape
    previous_B = requests.newest_ids_target_B
    state_BM = None if model.markov is None else model.markov.initial_state(num_requests)
    odds: list[torch.Tensor] = []
    for k in range(width):
        hidden_BH = hidden_BWH[:, k]
        is_predicting = k >= model.first_slot
        logits_BR = model.base_logits(hidden_BH) if is_predicting else None
        before_BM = None
        if model.markov is not None and state_BM is not None:
            step = model.markov.step(previous_B, hidden_BH, state_BM)
            state_BM, before_BM = step.state_BM, step.previous_BM
            logits_BR = None if logits_BR is None else logits_BR + step.bias_BR
        if logits_BR is None:
            continue
        logits_BR = model.select(logits_BR, previous_B, hidden_BH)
        previous_B = choose_round_drafts(
            chooser, logits_BR, requests, draft_index=k - model.first_slot
        )
        if model.confidence is not None:
            odds.append(model.confidence.logits(hidden_BH, before_BM))
    return torch.stack(odds, dim=1) if odds else None
