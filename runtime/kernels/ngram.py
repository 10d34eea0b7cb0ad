"""Prompt lookup on the device: what followed the last time the newest tokens occurred.

Every slot has a row with the tokens of its request so far. The longest suffix, at most `max_ngram`
long, that occurs earlier wins; among equal lengths the most recent occurrence. Integers only, so
that kernel and twin agree exactly, and both with `runtime.spec.ngram.lookup`.

Legend: S slots, the last one for padding; P positions of a row; B requests; G drafts, W = G + 1
rows of each request in a round.
"""

from __future__ import annotations

import torch


def find_drafts(
    history_SP: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    found_S: torch.Tensor,
    num_drafts: int,
    max_ngram: int,
) -> torch.Tensor:
    """Look the newest tokens of each request up in its own tokens.

    Args:
        history_SP: int32 or int64 target ids; what is beyond a request's newest token is ignored.
        slots_B: int64, contiguous.
        lengths_B: int64, position of the newest token, below P.
        found_S: int64, written at the slots: how many drafts there are, 0..G.
        num_drafts: G.
        max_ngram: longest suffix that is compared, at least 1.

    Returns:
        int64 target ids [B, G]; 0 beyond the drafts that there are.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    if history_SP.is_cuda:
        from runtime.kernels.cuda.ngram import launch_find_drafts as find
    else:
        find = find_drafts_twin
    return find(
        history_SP, slots_B, lengths_B, found_S=found_S, num_drafts=num_drafts, max_ngram=max_ngram
    )


def append_history(
    history_SP: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    next_ids_BW: torch.Tensor,
) -> None:
    """Write the tokens after each request's newest one; those that are not final come again.

    Args:
        history_SP: int32 or int64, written.
        slots_B: int64, contiguous.
        lengths_B: int64, position of the newest token.
        next_ids_BW: int64 target ids, at the positions from the next one on; those beyond P have
            no place.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    if history_SP.is_cuda:
        from runtime.kernels.cuda.ngram import launch_append_history as append
    else:
        append = append_history_twin
    append(history_SP, slots_B, lengths_B, next_ids_BW)


def find_drafts_twin(
    history_SP: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    found_S: torch.Tensor,
    num_drafts: int,
    max_ngram: int,
) -> torch.Tensor:
    """Compute `find_drafts` with torch."""
    ids_BP = history_SP.index_select(0, slots_B)
    last = ids_BP.shape[1] - 1
    ends_P = torch.arange(ids_BP.shape[1], device=ids_BP.device)
    newest_B1 = lengths_B[:, None]
    is_equal_BP = ends_P < newest_B1
    matched_BP = torch.zeros_like(ids_BP, dtype=torch.int64)
    for back in range(max_ngram):
        suffix_B1 = ids_BP.gather(1, (newest_B1 - back).clamp(min=0))
        before_BP = ids_BP[:, (ends_P - back).clamp(min=0)]
        is_equal_BP = is_equal_BP & (before_BP == suffix_B1) & (ends_P >= back)
        matched_BP += is_equal_BP
    # The longest match, then the last one: one number orders both.
    scores_BP = torch.where(matched_BP > 0, matched_BP * ids_BP.shape[1] + ends_P, -1)
    best_B = scores_BP.amax(dim=1)
    end_B = best_B % ids_BP.shape[1]
    found_B = torch.where(best_B >= 0, (lengths_B - end_B).clamp(max=num_drafts), 0)
    found_S.index_copy_(0, slots_B, found_B)
    offset_G = torch.arange(num_drafts, device=ids_BP.device)
    places_BG = (end_B[:, None] + 1 + offset_G).clamp(max=last)
    return ids_BP.gather(1, places_BG).long() * (offset_G < found_B[:, None])


def append_history_twin(
    history_SP: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    next_ids_BW: torch.Tensor,
) -> None:
    """Compute `append_history` with torch."""
    num_positions = history_SP.shape[1]
    offset_W = torch.arange(next_ids_BW.shape[1], device=history_SP.device)
    positions_BW = lengths_B[:, None] + 1 + offset_W
    is_there_BW = positions_BW < num_positions
    cells_BW = slots_B[:, None] * num_positions + positions_BW
    history_SP.view(-1)[cells_BW[is_there_BW]] = next_ids_BW[is_there_BW].to(history_SP.dtype)
