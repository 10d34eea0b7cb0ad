"""Prompt lookup on CUDA: one program per request; twins in `runtime.kernels.ngram`.

Legend: S slots, P positions of a slot's row, B requests, G drafts, W = G + 1 rows of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, power_of_two

FIND_BLOCK = 2048
"""Positions that are compared at once; the bits do not depend on it."""
FIND_WARPS = 8

_LENGTH_SHIFT = tl.constexpr(32)


@triton.jit
def find_drafts_kernel(
    history_ptr,
    slots_ptr,
    lengths_ptr,
    found_ptr,
    drafts_ptr,
    stride_history,
    COUNT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Score every earlier position by (matched tokens, position), then copy what follows the best.

    A request's own positions are read only, so the work follows its length.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    newest = tl.load(lengths_ptr + request)
    row = history_ptr + slot * stride_history
    best = newest * 0 - 1
    for start in range(0, newest, BLOCK_P):
        ends = start + tl.arange(0, BLOCK_P).to(tl.int64)
        is_equal = ends < newest
        matched = tl.zeros([BLOCK_P], dtype=tl.int64)
        for back in tl.static_range(MAX_NGRAM):
            suffix = tl.load(row + newest - back, mask=newest >= back, other=0)
            is_equal = is_equal & (ends >= back)
            before = tl.load(row + ends - back, mask=is_equal, other=0)
            is_equal = is_equal & (before == suffix)
            matched += is_equal.to(tl.int64)
        scores = tl.where(matched > 0, (matched << _LENGTH_SHIFT) + ends, -1)
        best = tl.maximum(best, tl.max(scores, axis=0))
    end = best & 0xFFFFFFFF
    found = tl.where(best >= 0, tl.minimum(newest - end, COUNT), 0)
    tl.store(found_ptr + slot, found)
    offsets = tl.arange(0, BLOCK_G)
    drafts = tl.load(row + end + 1 + offsets, mask=offsets < found, other=0)
    tl.store(drafts_ptr + request * COUNT + offsets, drafts.to(tl.int64), mask=offsets < COUNT)


@triton.jit
def append_history_kernel(
    history_ptr,
    slots_ptr,
    lengths_ptr,
    chosen_ptr,
    num_positions,
    stride_history,
    stride_chosen,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write a request's next tokens behind its newest one."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    offsets = tl.arange(0, BLOCK_W)
    positions = tl.load(lengths_ptr + request) + 1 + offsets
    mask = offsets < WIDTH
    chosen = tl.load(chosen_ptr + request * stride_chosen + offsets, mask=mask, other=0)
    cells = history_ptr + slot * stride_history + positions
    tl.store(
        cells, chosen.to(history_ptr.dtype.element_ty), mask=mask & (positions < num_positions)
    )


def launch_find_drafts(
    history_SP: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    found_S: torch.Tensor,
    num_drafts: int,
    max_ngram: int,
) -> torch.Tensor:
    """Launch `find_drafts`."""
    num_requests = slots_B.shape[0]
    assert slots_B.is_contiguous(), "slots are read one by one"
    assert history_SP.stride(1) == 1, "rows are read token by token"
    drafts_BG = torch.empty((num_requests, num_drafts), dtype=torch.int64, device=slots_B.device)
    find_drafts_kernel[(num_requests,)](
        history_SP,
        slots_B,
        lengths_B.contiguous(),
        found_S,
        drafts_BG,
        history_SP.stride(0),
        **find_constants(num_drafts, max_ngram),
        num_warps=FIND_WARPS,
    )
    return drafts_BG


def launch_append_history(
    history_SP: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    next_ids_BW: torch.Tensor,
) -> None:
    """Launch `append_history`."""
    assert slots_B.is_contiguous(), "slots are read one by one"
    assert history_SP.stride(1) == 1, "rows are written token by token"
    next_ids_BW = inner_contiguous(next_ids_BW)
    append_history_kernel[(slots_B.shape[0],)](
        history_SP,
        slots_B,
        lengths_B.contiguous(),
        next_ids_BW,
        history_SP.shape[1],
        history_SP.stride(0),
        next_ids_BW.stride(0),
        **append_constants(next_ids_BW.shape[1]),
        num_warps=1,
    )


def find_constants(num_drafts: int, max_ngram: int) -> dict[str, int]:
    """Return the compile-time arguments of `find_drafts_kernel`."""
    return {
        "COUNT": num_drafts,
        "BLOCK_G": power_of_two(num_drafts),
        "MAX_NGRAM": max_ngram,
        "BLOCK_P": FIND_BLOCK,
    }


def append_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments of `append_history_kernel`."""
    return {"WIDTH": width, "BLOCK_W": power_of_two(width)}
