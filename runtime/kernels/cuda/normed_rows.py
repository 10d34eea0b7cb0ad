"""Products that take in the norm of their rows on CUDA.

Rows times the norm's weight go into the product, and the rows' scale comes after it.

A joined product does so itself: a row's squares are added step by step, one sum for each place in a
step, and these sums are folded in a fixed tree. BLOCK_K is pinned, so a program with any number of
rows makes the same bits. A head has too many programs for that: its rows enter a stream of their
own, whose scales its programs take, or find here.

Legend: M rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div
from runtime.kernels.cuda.stream import fold_columns, load_squares, scale_constants, stream_scale
from runtime.kernels.stream import Stream

_SCALE_ROWS = 16  # of a program that computes scales


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


@triton.jit(do_not_specialize=["num_rows"])
def row_scales_kernel(
    squares_ptr, scale_ptr, eps, num_rows,
    FEATURES: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the scales of BLOCK_M rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    squares = load_squares(squares_ptr, rows, is_row, TILES, BLOCK_T)
    scale = stream_scale(squares, eps, FEATURES, BLOCK_M, BLOCK_T)
    tl.store(scale_ptr + rows, scale, mask=is_row)


def launch_row_scales(stream: Stream, eps: float) -> torch.Tensor:
    """Return 1 / root mean square of a stream's rows, float32 [M]: the bits that products use."""
    num_rows, width = stream.residual_MD.shape
    scale_M = torch.empty(num_rows, dtype=torch.float32, device=stream.residual_MD.device)
    if num_rows > 0:
        row_scales_kernel[(ceil_div(num_rows, _SCALE_ROWS),)](
            stream.squares_MT, scale_M, eps, num_rows, **row_scale_constants(width), num_warps=4
        )
    return scale_M


def row_scale_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments of `row_scales_kernel`."""
    return {"FEATURES": width, **scale_constants(width), "BLOCK_M": _SCALE_ROWS}
