"""The ends of a block draft in a round: the rows of its blocks, and what its confidence head says.

Copies and integers only, so that kernel and twin agree exactly.

Legend: B requests, W rows of a block, N = B W, X positions of a round, G drafts, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockPlaces:
    """Rows of blocks, one block after the other.

    Args:
        ids_target_N: int64, the newest id and masks behind it.
        positions_N: int64.
        kv_slots_N: int64.
        row_request_N: int32.
        anchors_N: int64, position of the first row of the block.
        ends_N: int64, position of the last row that the request's own drafts take.
    """

    ids_target_N: torch.Tensor
    positions_N: torch.Tensor
    kv_slots_N: torch.Tensor
    row_request_N: torch.Tensor
    anchors_N: torch.Tensor
    ends_N: torch.Tensor


def place_blocks(
    lengths_B: torch.Tensor,
    newest_ids_target_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    kv_slots_BX: torch.Tensor,
    *,
    width: int,
    first_slot: int,
    mask_id_target: int,
) -> BlockPlaces:
    """Place a block of W rows behind each request's context.

    Args:
        lengths_B: int64, position of the newest token.
        newest_ids_target_B: int64.
        num_drafts_B: int64; a request without drafts has a block of one predicting row, which
            nobody reads.
        kv_slots_BX: int64, flat KV slots of the positions from the length on, W of them or more.
        width: W.
        first_slot: rows of a block that predict nothing.
        mask_id_target: id of the rows behind the first.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    assert width <= kv_slots_BX.shape[1], "every row of a block has a KV slot"
    if lengths_B.is_cuda:
        from runtime.kernels.cuda.block_rows import launch_place_blocks as place
    else:
        place = place_blocks_twin
    return place(
        lengths_B, newest_ids_target_B, num_drafts_B, kv_slots_BX,
        width=width, first_slot=first_slot, mask_id_target=mask_id_target,
    )  # fmt: skip


def keep_chances(
    chances_BG: torch.Tensor,
    num_drafts_B: torch.Tensor,
    slots_B: torch.Tensor,
    kept_SG: torch.Tensor,
) -> None:
    """Write the chances of the drafts that count to their slots; what else is there stays.

    Args:
        chances_BG: float32.
        num_drafts_B: int64, drafts that count; 0 for padding, which may share a slot.
        slots_B: int64, below S.
        kept_SG: float32, at least as wide as the chances; written in place.

    Exactness: a copy.
    Graph-safe: yes (CUDA).
    """
    assert chances_BG.shape[1] <= kept_SG.shape[1], "a slot holds every draft's chance"
    if chances_BG.is_cuda:
        from runtime.kernels.cuda.block_rows import launch_keep_chances as keep
    else:
        keep = keep_chances_twin
    keep(chances_BG, num_drafts_B, slots_B, kept_SG)


def place_blocks_twin(
    lengths_B: torch.Tensor,
    newest_ids_target_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    kv_slots_BX: torch.Tensor,
    *,
    width: int,
    first_slot: int,
    mask_id_target: int,
) -> BlockPlaces:
    """Compute `place_blocks` with torch."""
    num_requests, device = lengths_B.shape[0], lengths_B.device
    ids_BW = lengths_B.new_full((num_requests, width), mask_id_target)
    ids_BW[:, 0] = newest_ids_target_B
    requests_B = torch.arange(num_requests, dtype=torch.int32, device=device)
    ends_B = lengths_B + num_drafts_B.clamp(min=1) + (first_slot - 1)
    return BlockPlaces(
        ids_target_N=ids_BW.flatten(),
        positions_N=(lengths_B[:, None] + torch.arange(width, device=device)).flatten(),
        kv_slots_N=kv_slots_BX[:, :width].flatten().contiguous(),  # flatten may keep strides
        row_request_N=requests_B.repeat_interleave(width),
        anchors_N=lengths_B.repeat_interleave(width),
        ends_N=ends_B.repeat_interleave(width),
    )


def keep_chances_twin(
    chances_BG: torch.Tensor,
    num_drafts_B: torch.Tensor,
    slots_B: torch.Tensor,
    kept_SG: torch.Tensor,
) -> None:
    """Compute `keep_chances` with torch."""
    num_drafts = chances_BG.shape[1]
    known_BG = kept_SG.index_select(0, slots_B)
    is_draft_BG = torch.arange(num_drafts, device=slots_B.device) < num_drafts_B[:, None]
    known_BG[:, :num_drafts] = torch.where(is_draft_BG, chances_BG, known_BG[:, :num_drafts])
    kept_SG.index_copy_(0, slots_B, known_BG)
