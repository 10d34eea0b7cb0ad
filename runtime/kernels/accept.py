"""Acceptance of a dense round: which drafts the target agrees with, and the tokens that follow.

A draft is accepted iff it and all drafts before it equal what the target chose at their places; the
target's own choice after the last accepted draft is committed with them.

Legend: B requests, G draft slots of a request, W = G + 1 verified rows of a request.
"""

from __future__ import annotations

import torch

NO_TOKEN = -1
"""What `committed_BW` holds beyond a request's committed tokens; no vocabulary has this id."""


def accept(
    drafts_BG: torch.Tensor, chosen_BW: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare drafts with the target's choices.

    Args:
        drafts_BG: int64 target ids; G may be 0.
        chosen_BW: int64 target ids chosen at the row of the newest token and of each draft.
        num_drafts_B: drafts that count, at most G each; slots beyond them are never accepted.

    Returns:
        (num_accepted int64 [B], committed int64 [B, W]): request b commits the first
        num_accepted[b] + 1 ids of its row, the others are NO_TOKEN.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    assert chosen_BW.shape == (drafts_BG.shape[0], drafts_BG.shape[1] + 1), "W is G + 1"
    if chosen_BW.is_cuda:
        from runtime.kernels.cuda.accept import launch_accept

        return launch_accept(drafts_BG, chosen_BW, num_drafts_B)
    return accept_twin(drafts_BG, chosen_BW, num_drafts_B)


def accept_twin(
    drafts_BG: torch.Tensor, chosen_BW: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `accept` with torch."""
    slots_W = torch.arange(chosen_BW.shape[1])
    is_equal_BG = (drafts_BG == chosen_BW[:, :-1]) & (slots_W[:-1] < num_drafts_B.unsqueeze(1))
    num_accepted_B = is_equal_BG.long().cumprod(dim=1).sum(dim=1)
    committed_BW = chosen_BW.where(slots_W <= num_accepted_B.unsqueeze(1), NO_TOKEN)
    return num_accepted_B, committed_BW
