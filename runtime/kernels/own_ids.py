"""The ids of its own that each slot keeps: the newest distinct ones outside a token map.

A slot has a ring of E places; the place of the next id is the number of ids that it took so far,
modulo E, so the oldest leaves first. An id that the ring holds is not taken again; one that left
may come back. Integers only, so that kernel and twin agree exactly, and both with
`runtime.spec.dynamic_rows`, which does the same on the host.

Legend: S slots, the last one for padding; E places of a slot's ring; B requests; N rows that a
round verified, at most W of each request; V target vocabulary.
"""

from __future__ import annotations

import torch


def keep_own_ids(
    ids_target_SE: torch.Tensor,
    counts_S: torch.Tensor,
    slots_B: torch.Tensor,
    next_ids_target_N: torch.Tensor,
    *,
    first_rows_B: torch.Tensor | None,
    last_rows_B: torch.Tensor,
    is_outside_V: torch.Tensor,
    width: int,
) -> None:
    """Take in the ids that a round commits, row by row; the padding slot stays as it is.

    Args:
        ids_target_SE: int64 target ids, -1 in places that are free, written; E is at least 1.
        counts_S: int64, ids that a slot took so far, written.
        slots_B: int64, contiguous; no two requests share one but the last slot.
        next_ids_target_N: int64, contiguous, the target's choice at each row.
        first_rows_B: int64, row of each request's newest token; None: b * W.
        last_rows_B: int64, row of its newest final position: the choices up to it are committed.
        is_outside_V: bool, whether the map lacks a target id.
        width: W; more rows of a request are not looked at.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    assert ids_target_SE.shape[1] > 0, "a ring has a place"
    if ids_target_SE.is_cuda:
        from runtime.kernels.cuda.own_ids import launch_keep_own_ids as keep
    else:
        keep = keep_own_ids_twin
    keep(
        ids_target_SE, counts_S, slots_B, next_ids_target_N, first_rows_B=first_rows_B,
        last_rows_B=last_rows_B, is_outside_V=is_outside_V, width=width,
    )  # fmt: skip


def keep_own_ids_twin(
    ids_target_SE: torch.Tensor,
    counts_S: torch.Tensor,
    slots_B: torch.Tensor,
    next_ids_target_N: torch.Tensor,
    *,
    first_rows_B: torch.Tensor | None,
    last_rows_B: torch.Tensor,
    is_outside_V: torch.Tensor,
    width: int,
) -> None:
    """Compute `keep_own_ids` with torch, one id of every request at a time."""
    num_slots, num_places = ids_target_SE.shape
    if first_rows_B is None:
        first_rows_B = torch.arange(slots_B.shape[0], device=slots_B.device) * width
    is_real_B = slots_B != num_slots - 1
    own_BE = ids_target_SE.index_select(0, slots_B)
    counts_B = counts_S.index_select(0, slots_B)
    for w in range(width):
        rows_B = first_rows_B + w
        ids_B = next_ids_target_N[torch.minimum(rows_B, last_rows_B)]
        is_new_B = is_real_B & (rows_B <= last_rows_B) & is_outside_V[ids_B]
        is_new_B &= ~(own_BE == ids_B[:, None]).any(dim=1)
        places_B1 = (counts_B % num_places)[:, None]
        kept_B1 = own_BE.gather(1, places_B1)
        own_BE = own_BE.scatter(
            1, places_B1, torch.where(is_new_B[:, None], ids_B[:, None], kept_B1)
        )
        counts_B = counts_B + is_new_B
    ids_target_SE.index_copy_(0, slots_B, own_BE)
    counts_S.index_copy_(0, slots_B, counts_B)
