"""Products that take in the norm of their rows on CUDA.

Rows times the norm's weight go into the product, and the rows' scale comes after it.

A row's squares are added step by step, one sum for each place in a step, and these sums are folded
in a fixed tree. BLOCK_K is pinned, so a program with any number of rows, and the kernel that does
this ahead of a product with many rows, make the same bits.

Legend: M rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, overlap_options
from runtime.kernels.cuda.stream import fold_columns
from runtime.kernels.norm import RowNorm


@triton.jit
def row_scale(squares, eps, mean_factor, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return 1 / root mean square of rows from the sums of their squares [ROWS, BLOCK_K]."""
    total = fold_columns(squares, ROWS, BLOCK_K)
    # The contraction is written out, so that every kernel makes the same one.
    return tl.rsqrt(tl.fma(total, tl.full((ROWS,), mean_factor, tl.float32), eps))


@triton.jit
def weigh(x, norm):
    """Return rows times the norm's weight, rounded to the rows' dtype."""
    return (x.to(tl.float32) * norm.to(tl.float32)).to(x.dtype)


@triton.jit
def add_squares(squares, x):
    """Add the squares of a step of rows to their sums."""
    value = x.to(tl.float32)
    return tl.fma(value, value, squares)


@triton.jit
def sum_normed_rows(
    x_rows, norm_ptr, w_rows, is_row, is_column, num_features, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum the products of weighted rows [BLOCK_M, 1] and columns [1, BLOCK_N] that pointers name.

    Returns the sums in the order of `gemm_steps`, and those of the rows' squares.
    """
    steps = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for k in tl.range(0, num_features, BLOCK_K, num_stages=STAGES):
        ks = k + steps
        is_k = ks < num_features
        x = tl.load(x_rows + ks[None, :], mask=is_row & is_k[None, :], other=0.0)
        norm = tl.load(norm_ptr + ks, mask=is_k, other=0.0)
        w = tl.load(w_rows + ks[:, None], mask=is_column & is_k[:, None], other=0.0)
        squares = add_squares(squares, x)
        acc = tl.dot(weigh(x, norm[None, :]), w, acc, input_precision="ieee")
    return acc, squares


@triton.jit
def weigh_rows_kernel(
    x_ptr, norm_ptr, weighted_ptr, scale_ptr, eps, mean_factor, stride_xm,
    WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Weigh one row and compute its scale."""
    row = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros((1, BLOCK_K), dtype=tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        ks = (k + steps)[None, :]
        x = tl.load(x_ptr + row * stride_xm + ks, mask=ks < WIDTH, other=0.0)
        norm = tl.load(norm_ptr + ks, mask=ks < WIDTH, other=0.0)
        squares = add_squares(squares, x)
        tl.store(weighted_ptr + row * WIDTH + ks, weigh(x, norm), mask=ks < WIDTH)
    scale = row_scale(squares, eps, mean_factor, 1, BLOCK_K)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


def launch_weigh_rows(
    x_MD: torch.Tensor, norm: RowNorm, *, block_k: int, overlap: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weighted rows [M, D], their scales, float32 [M]) for a product in steps of BLOCK_K.

    The twin is `runtime.kernels.norm.weigh_rows_twin`.
    """
    x_MD = inner_contiguous(x_MD)
    num_rows, width = x_MD.shape
    weighted_MD = torch.empty((num_rows, width), dtype=x_MD.dtype, device=x_MD.device)
    scale_M = torch.empty(num_rows, dtype=torch.float32, device=x_MD.device)
    if num_rows == 0:
        return weighted_MD, scale_M
    is_overlapping, options = overlap_options(x_MD.device, overlap)
    weigh_rows_kernel[(num_rows,)](
        x_MD,
        norm.weight_D,
        weighted_MD,
        scale_M,
        norm.eps,
        1.0 / width,
        x_MD.stride(0),
        WIDTH=width,
        BLOCK_K=block_k,
        OVERLAP=is_overlapping,
        num_warps=1,
        **options,
    )
    return weighted_MD, scale_M
