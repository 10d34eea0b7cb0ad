"""The ends of a block draft in a round on CUDA: one program per request.

Legend: B requests, W rows of a block, N = B W, X positions of a round, G drafts, S slots.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from runtime.kernels.block_rows import BlockPlaces
from runtime.kernels.cuda.device import inner_contiguous, overlap_options, power_of_two


@triton.jit(do_not_specialize=["stride_slots"])
def place_blocks_kernel(
    lengths_ptr, newest_ptr, num_drafts_ptr, kv_slots_ptr,
    ids_ptr, positions_ptr, row_slots_ptr, row_request_ptr, anchors_ptr, ends_ptr,
    stride_slots,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, FIRST: tl.constexpr, MASK_ID: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the rows of a request's block; a forward may begin behind it."""
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK_W)
    mask = places < WIDTH
    rows = request * WIDTH + places
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(lengths_ptr + request)
    newest = tl.load(newest_ptr + request)
    num_drafts = tl.maximum(tl.load(num_drafts_ptr + request), 1)
    kv_slots = tl.load(kv_slots_ptr + request * stride_slots + places, mask=mask, other=0)
    positions = length + places
    tl.store(ids_ptr + rows, tl.where(places == 0, newest, MASK_ID), mask=mask)
    tl.store(positions_ptr + rows, positions, mask=mask)
    tl.store(row_slots_ptr + rows, kv_slots, mask=mask)
    tl.store(row_request_ptr + rows, (places * 0 + request).to(tl.int32), mask=mask)
    tl.store(anchors_ptr + rows, positions - places, mask=mask)
    tl.store(ends_ptr + rows, positions - places + (num_drafts + FIRST - 1), mask=mask)


@triton.jit(do_not_specialize=["stride_chances", "stride_kept"])
def keep_chances_kernel(
    chances_ptr, num_drafts_ptr, slots_ptr, kept_ptr, stride_chances, stride_kept,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy the chances of a request's own drafts to its slot."""
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_draft = (places < DRAFTS) & (places < tl.load(num_drafts_ptr + request))
    slot = tl.load(slots_ptr + request)
    chances = tl.load(chances_ptr + request * stride_chances + places, mask=is_draft)
    tl.store(kept_ptr + slot * stride_kept + places, chances, mask=is_draft)


def launch_place_blocks(
    lengths_B: torch.Tensor,
    newest_ids_target_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    kv_slots_BX: torch.Tensor,
    *,
    width: int,
    first_slot: int,
    mask_id_target: int,
) -> BlockPlaces:
    """Launch `place_blocks`."""
    num_requests, device = lengths_B.shape[0], lengths_B.device
    kv_slots_BX = inner_contiguous(kv_slots_BX)
    new_ints = functools.partial(torch.empty, num_requests * width, device=device)
    places = BlockPlaces(
        ids_target_N=new_ints(dtype=torch.int64),
        positions_N=new_ints(dtype=torch.int64),
        kv_slots_N=new_ints(dtype=torch.int64),
        row_request_N=new_ints(dtype=torch.int32),
        anchors_N=new_ints(dtype=torch.int64),
        ends_N=new_ints(dtype=torch.int64),
    )
    overlapped, options = overlap_options(device, None)
    place_blocks_kernel[(num_requests,)](
        lengths_B.contiguous(),
        newest_ids_target_B.contiguous(),
        num_drafts_B.contiguous(),
        kv_slots_BX,
        places.ids_target_N,
        places.positions_N,
        places.kv_slots_N,
        places.row_request_N,
        places.anchors_N,
        places.ends_N,
        kv_slots_BX.stride(0),
        **place_constants(width, first_slot=first_slot, mask_id_target=mask_id_target),
        OVERLAP=overlapped,
        num_warps=1,
        **options,
    )
    return places


def launch_keep_chances(
    chances_BG: torch.Tensor,
    num_drafts_B: torch.Tensor,
    slots_B: torch.Tensor,
    kept_SG: torch.Tensor,
) -> None:
    """Launch `keep_chances`."""
    assert kept_SG.stride(1) == 1, "chances are written one beside the other"
    chances_BG = inner_contiguous(chances_BG)
    num_requests, num_drafts = chances_BG.shape
    overlapped, options = overlap_options(kept_SG.device, None)
    keep_chances_kernel[(num_requests,)](
        chances_BG,
        num_drafts_B.contiguous(),
        slots_B.contiguous(),
        kept_SG,
        chances_BG.stride(0),
        kept_SG.stride(0),
        **keep_constants(num_drafts),
        OVERLAP=overlapped,
        num_warps=1,
        **options,
    )


def place_constants(width: int, *, first_slot: int, mask_id_target: int) -> dict[str, int]:
    """Return the compile-time arguments of `place_blocks_kernel`."""
    return {
        "WIDTH": width,
        "BLOCK_W": power_of_two(width),
        "FIRST": first_slot,
        "MASK_ID": mask_id_target,
    }


def keep_constants(num_drafts: int) -> dict[str, int]:
    """Return the compile-time arguments of `keep_chances_kernel`."""
    return {"DRAFTS": num_drafts, "BLOCK": power_of_two(num_drafts)}
