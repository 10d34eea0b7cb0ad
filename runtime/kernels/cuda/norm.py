"""Root-mean-square norms on CUDA: a program per row, or per row and some of its heads.

A row's tree is fixed by its width. A head's is the tree of each of its halves, the form in which
attention holds a head, so that the norm has the same bits inside attention and beside it.

Legend: M rows, D width, H heads, P head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import (
    ceil_div,
    inner_contiguous,
    overlap_options,
    power_of_two,
)
from runtime.kernels.cuda.stream import fold_columns, rounded_square

_MOST_HEADS = 16  # of a row in one program


@triton.jit
def _normalise(x, w, eps, WIDTH: tl.constexpr):
    mean_square = tl.sum(x * x, axis=0) / WIDTH
    scaled = x * tl.rsqrt(mean_square + eps)
    return scaled.to(w.dtype).to(tl.float32) * w.to(tl.float32)


@triton.jit
def norm_heads(
    low, high, w_low, w_high, eps,
    ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Normalise heads given as halves [ROWS, P / 2], zero beyond the head; weights [1, P / 2].

    The results have the weights' dtype.
    """
    low, high = low.to(tl.float32), high.to(tl.float32)
    total = fold_columns(rounded_square(low), ROWS, BLOCK_HALF)
    total = total + fold_columns(rounded_square(high), ROWS, BLOCK_HALF)
    # The contraction is written out, so that every kernel makes the same one.
    scale = tl.rsqrt(tl.fma(total, tl.full((ROWS,), 1.0 / HEAD_DIM, tl.float32), eps))[:, None]
    low = (low * scale).to(w_low.dtype).to(tl.float32) * w_low.to(tl.float32)
    high = (high * scale).to(w_high.dtype).to(tl.float32) * w_high.to(tl.float32)
    return low.to(w_low.dtype), high.to(w_high.dtype)


@triton.jit
def head_norm_kernel(
    x_ptr, w_ptr, out_ptr, eps, stride_row, stride_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Normalise BLOCK_H heads of a row; out is contiguous."""
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < HEADS) & (lanes < HALF)
    source = x_ptr + row * stride_row + heads * stride_head + lanes
    low, high = norm_heads(
        tl.load(source, mask=mask, other=0.0),
        tl.load(source + HALF, mask=mask, other=0.0),
        tl.load(w_ptr + lanes, mask=lanes < HALF, other=0.0),
        tl.load(w_ptr + HALF + lanes, mask=lanes < HALF, other=0.0),
        eps, BLOCK_H, BLOCK_HALF, HEAD_DIM,
    )  # fmt: skip
    target = out_ptr + (row * HEADS + heads) * HEAD_DIM + lanes
    tl.store(target, low, mask=mask)
    tl.store(target + HALF, high, mask=mask)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    eps,
    stride_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise one row; out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(w_ptr + columns, mask=mask, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride_row + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(x, w, eps, WIDTH)
    tl.store(out_ptr + row * WIDTH + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(
    x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, overlap: bool | None = None
) -> torch.Tensor:
    """Launch `rms_norm`; rows may be strided."""
    x_MD = inner_contiguous(x_MD)
    num_rows, width = x_MD.shape
    out = torch.empty((num_rows, width), dtype=x_MD.dtype, device=x_MD.device)
    if num_rows == 0:
        return out
    is_overlapping, options = overlap_options(x_MD.device, overlap)
    rms_norm_kernel[(num_rows,)](
        x_MD,
        weight_D,
        out,
        eps,
        x_MD.stride(0),
        **norm_constants(width),
        OVERLAP=is_overlapping,
        num_warps=norm_warps(width),
        **options,
    )
    return out


def launch_head_rms_norm(x_MHP: torch.Tensor, weight_P: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch `head_rms_norm`; rows and heads may be strided."""
    x_MHP = inner_contiguous(x_MHP)
    num_rows, num_heads, head_dim = x_MHP.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=x_MHP.dtype, device=x_MHP.device)
    if num_rows == 0:
        return out
    constants = head_norm_constants(num_heads, head_dim)
    head_norm_kernel[(num_rows, ceil_div(num_heads, constants["BLOCK_H"]))](
        x_MHP, weight_P, out, eps, x_MHP.stride(0), x_MHP.stride(1), **constants, num_warps=4
    )
    return out


def head_norm_constants(num_heads: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `head_norm_kernel`."""
    return {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": min(_MOST_HEADS, power_of_two(num_heads)),
        "BLOCK_HALF": power_of_two(head_dim // 2, at_least=16),
    }


def norm_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the width."""
    return {"WIDTH": width, "BLOCK": power_of_two(width)}


def norm_warps(width: int) -> int:
    """Return the warps of a norm program, a function of the width alone."""
    return 1 if width <= 256 else 4 if width <= 2048 else 8
