"""Acceptance of a dense round on CUDA: one program per request.

Legend: B requests, G draft slots of a request, W = G + 1 verified rows of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, overlap_options, power_of_two


@triton.jit
def count_accepted(chosen, drafts_ptr, num_drafts_ptr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the place of a request's first draft that differs from the choices [BLOCK_W]."""
    slots = tl.arange(0, BLOCK_W)
    mask = (slots < tl.load(num_drafts_ptr)) & (slots < WIDTH - 1)
    drafts = tl.load(drafts_ptr + slots, mask=mask, other=-1)
    is_equal = mask & (drafts == chosen)
    return tl.min(tl.where(is_equal, WIDTH, slots), axis=0)


@triton.jit(do_not_specialize=["stride_drafts", "stride_chosen"])
def accept_kernel(
    drafts_ptr,
    chosen_ptr,
    num_drafts_ptr,
    accepted_ptr,
    committed_ptr,
    stride_drafts,
    stride_chosen,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find the first draft that differs; commit the choices up to its place."""
    request = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_W)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chosen = tl.load(chosen_ptr + request * stride_chosen + slots, mask=slots < WIDTH, other=-1)
    num_accepted = count_accepted(
        chosen, drafts_ptr + request * stride_drafts, num_drafts_ptr + request, WIDTH, BLOCK_W
    )
    tl.store(accepted_ptr + request, num_accepted.to(tl.int64))
    committed = tl.where(slots <= num_accepted, chosen, -1)
    tl.store(committed_ptr + request * WIDTH + slots, committed, mask=slots < WIDTH)


def launch_accept(
    drafts_BG: torch.Tensor, chosen_BW: torch.Tensor, num_drafts_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `accept`."""
    num_requests, width = chosen_BW.shape
    accepted_B = torch.empty(num_requests, dtype=torch.int64, device=chosen_BW.device)
    committed_BW = torch.empty_like(chosen_BW, memory_format=torch.contiguous_format)
    if num_requests == 0:
        return accepted_B, committed_BW
    is_overlapping, options = overlap_options(chosen_BW.device, None)
    chosen_BW, drafts_BG = inner_contiguous(chosen_BW), inner_contiguous(drafts_BG)
    accept_kernel[(num_requests,)](
        drafts_BG if width > 1 else chosen_BW,  # never read when no request has a draft slot
        chosen_BW,
        num_drafts_B.contiguous(),
        accepted_B,
        committed_BW,
        drafts_BG.stride(0),
        chosen_BW.stride(0),
        **accept_constants(width),
        OVERLAP=is_overlapping,
        num_warps=1,
        **options,
    )
    return accepted_B, committed_BW


def accept_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments of `accept_kernel`."""
    return {"WIDTH": width, "BLOCK_W": power_of_two(width)}
