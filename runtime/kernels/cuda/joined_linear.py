"""Product of two normed rows side by side on CUDA: one kernel, halves of K in one loop or two.

Legend: M rows, D width of a half, N output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import (
    ceil_div,
    device_arch,
    inner_contiguous,
    overlap_options,
)
from runtime.kernels.cuda.normed_rows import add_squares, row_scale, weigh
from runtime.kernels.cuda.products import LINE_ELEMENTS, PREFETCH_FEATURES, prefetch_lines
from runtime.kernels.fused_table import FusedConfig, fitting_stages, fused_config
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, block_m_for
from runtime.kernels.joined_linear import RowHalf

_DEEP_BYTES = 131_072  # of a multiprocessor's shared memory for loads ahead, where rows are few
_SPREAD_PROGRAMS = 128  # that have a multiprocessor each


@triton.jit
def _add_step(
    acc, squares, x_rows, norm_ptr, w_rows, ks, is_row, is_column, is_k, NORMED: tl.constexpr
):
    """Add a step of a half to its sums and, NORMED, to those of its rows' squares."""
    x = tl.load(x_rows + ks[None, :], mask=is_row & is_k[None, :], other=0.0)
    w = tl.load(w_rows + ks[:, None], mask=is_column & is_k[:, None], other=0.0)
    if NORMED:
        norm = tl.load(norm_ptr + ks, mask=is_k, other=0.0)
        squares = add_squares(squares, x)
        x = weigh(x, norm[None, :])
    return tl.dot(x, w, acc, input_precision="ieee"), squares


@triton.jit
def _sum_half(
    x_rows, norm_ptr, w_rows, is_row, is_column,
    WIDTH: tl.constexpr, NORMED: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum a half of rows [BLOCK_M, 1] and columns [1, BLOCK_N] that pointers name.

    Returns the sums in the order of `gemm_steps`, and those of the rows' squares.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for k in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        ks = k + tl.arange(0, BLOCK_K)
        acc, squares = _add_step(
            acc, squares, x_rows, norm_ptr, w_rows, ks, is_row, is_column, ks < WIDTH, NORMED
        )  # fmt: skip
    return acc, squares


@triton.jit
def _sum_halves(
    first_rows, first_norm_ptr, second_rows, second_norm_ptr, w_rows, is_row, is_column,
    WIDTH: tl.constexpr, FIRST_NORMED: tl.constexpr, SECOND_NORMED: tl.constexpr,
    STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum both halves as `_sum_half` does, in one loop: neither waits for the other.

    The one that may have to look its rows up comes second.
    """
    first = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first_squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    second_squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for k in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        ks = k + tl.arange(0, BLOCK_K)
        is_k = ks < WIDTH
        second, second_squares = _add_step(
            second, second_squares, second_rows, second_norm_ptr, w_rows + WIDTH, ks,
            is_row, is_column, is_k, SECOND_NORMED,
        )  # fmt: skip
        first, first_squares = _add_step(
            first, first_squares, first_rows, first_norm_ptr, w_rows, ks,
            is_row, is_column, is_k, FIRST_NORMED,
        )  # fmt: skip
    return first, first_squares, second, second_squares


@triton.jit
def _scale(
    squares, eps, mean_factor,
    NORMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the rows' scales for each column; ones unless NORMED."""
    if NORMED:
        scale = row_scale(squares, eps, mean_factor, BLOCK_M, BLOCK_K)
    else:
        scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    return tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_N))


@triton.jit
def _rows_at(x_ptr, ids_ptr, rows, is_row, stride_xm, GATHERED: tl.constexpr):
    """Return pointers [BLOCK_M, 1] to rows, or to those that ids name."""
    sources = rows
    if GATHERED:
        sources = tl.load(ids_ptr + rows, mask=is_row, other=0)
    return (x_ptr + sources * stride_xm)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def joined_linear_kernel(
    first_ptr, first_ids_ptr, first_norm_ptr, second_ptr, second_ids_ptr, second_norm_ptr,
    w_ptr, bias_ptr, out_ptr, first_eps, second_eps, mean_factor,
    num_rows, stride_first, stride_second,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    FIRST_GATHERED: tl.constexpr, FIRST_NORMED: tl.constexpr,
    SECOND_GATHERED: tl.constexpr, SECOND_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TOGETHER: tl.constexpr, PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the product: each half's sums times its rows' scales, the bias, one rounding."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = (columns < COLUMNS)[None, :]
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * (2 * WIDTH)
    if OVERLAP:  # it may begin a forward: see IS_OVERLAPPING
        if PREFETCH > 0:
            near = w_ptr + tl.minimum(columns, COLUMNS - 1).to(tl.int64)[None, :] * (2 * WIDTH)
            for k in range(0, PREFETCH, BLOCK_K):
                lines = k + tl.arange(0, BLOCK_K // LINE_ELEMENTS) * LINE_ELEMENTS
                prefetch_lines(near + lines[:, None])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    second_rows = _rows_at(
        second_ptr, second_ids_ptr, rows, is_row, stride_second, SECOND_GATHERED
    )  # fmt: skip
    first_rows = _rows_at(first_ptr, first_ids_ptr, rows, is_row, stride_first, FIRST_GATHERED)
    if TOGETHER:
        first, first_squares, second, second_squares = _sum_halves(
            first_rows, first_norm_ptr, second_rows, second_norm_ptr, w_rows, is_row[:, None],
            is_column, WIDTH, FIRST_NORMED, SECOND_NORMED, STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        first, first_squares = _sum_half(
            first_rows, first_norm_ptr, w_rows, is_row[:, None], is_column,
            WIDTH, FIRST_NORMED, STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    # A product with a rounding of its own: what follows must not contract it.
    y = tl.fma(
        first,
        _scale(first_squares, first_eps, mean_factor, FIRST_NORMED, BLOCK_M, BLOCK_N, BLOCK_K),
        tl.zeros_like(first),
    )
    if not TOGETHER:
        second, second_squares = _sum_half(
            second_rows, second_norm_ptr, w_rows + WIDTH, is_row[:, None], is_column,
            WIDTH, SECOND_NORMED, STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    y = tl.fma(
        second,
        _scale(second_squares, second_eps, mean_factor, SECOND_NORMED, BLOCK_M, BLOCK_N, BLOCK_K),
        y,
    )
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + columns[None, :], mask=is_column, other=0.0).to(tl.float32)
    out = out_ptr + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)


def launch_joined_linear(
    first: RowHalf,
    second: RowHalf,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    config: FusedConfig | None = None,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Launch `joined_linear`; `config` and `overlap` replace the pinned choices (tests, tuning)."""
    rows, others = inner_contiguous(first.rows_XD), inner_contiguous(second.rows_XD)
    num_rows, width = first.num_rows, rows.shape[1]
    assert others.shape[1] == width, "both halves have one width"
    assert second.num_rows == num_rows, "a row has two halves"
    assert weight_NK.shape[1] == 2 * width, "weight and rows disagree on K"
    assert weight_NK.is_contiguous(), "weights are read row by row"
    num_columns, element_bytes = weight_NK.shape[0], rows.element_size()
    out = torch.empty((num_rows, num_columns), dtype=rows.dtype, device=rows.device)
    if num_rows == 0:
        return out
    config = config or joined_config(
        num_columns, width, element_bytes=element_bytes, arch=device_arch(rows.device)
    )
    block_m = block_m_for(num_rows)
    overlapped, options = overlap_options(rows.device, overlap)
    joined_linear_kernel[(ceil_div(num_rows, block_m), ceil_div(num_columns, config.block_n))](
        rows,
        rows if first.ids_M is None else first.ids_M,
        rows if first.norm is None else first.norm.weight_D,
        others,
        rows if second.ids_M is None else second.ids_M,
        rows if second.norm is None else second.norm.weight_D,
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        out,
        0.0 if first.norm is None else first.norm.eps,
        0.0 if second.norm is None else second.norm.eps,
        1.0 / width,
        num_rows,
        rows.stride(0),
        others.stride(0),
        FIRST_GATHERED=first.ids_M is not None,
        FIRST_NORMED=first.norm is not None,
        SECOND_GATHERED=second.ids_M is not None,
        SECOND_NORMED=second.norm is not None,
        HAS_BIAS=bias_N is not None,
        **joined_constants(
            num_columns,
            width,
            config,
            block_m,
            element_bytes=element_bytes,
            is_overlapping=overlapped > 0,
        ),
        num_warps=config.num_warps,
        **options,
    )
    return out


def joined_config(num_columns: int, width: int, *, element_bytes: int, arch: int) -> FusedConfig:
    """Return the pinned tile; a half sums its K in one part, whatever the entry says of parts."""
    return fused_config("scaled", num_columns, 2 * width, element_bytes=element_bytes, arch=arch)


def joined_constants(
    num_columns: int,
    width: int,
    config: FusedConfig,
    block_m: int,
    *,
    element_bytes: int,
    is_overlapping: bool,
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `joined_linear_kernel` that are no flags of halves."""
    can_prefetch = is_overlapping and element_bytes == 2 and config.block_k >= 64
    whole_steps = min(2 * width, PREFETCH_FEATURES) // config.block_k * config.block_k
    return {
        "COLUMNS": num_columns,
        "WIDTH": width,
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": _stages(num_columns, width, config, block_m, element_bytes),
        "TOGETHER": _is_together(block_m),
        "PREFETCH": whole_steps if can_prefetch else 0,
        "OVERLAP": is_overlapping,
    }


def _stages(
    num_columns: int, width: int, config: FusedConfig, block_m: int, element_bytes: int
) -> int:
    """Return the depth of the pipeline; bits do not depend on it.

    Programs of few rows are few, and their one loop lasts as long as its loads: they ask for as
    much ahead as fits, best for all of K. One stage is consumed while the others are on their way.
    """
    if not _is_together(block_m):
        return fitting_stages(config, block_m, element_bytes)
    sharing = ceil_div(ceil_div(num_columns, config.block_n), _SPREAD_PROGRAMS)
    step_bytes = 2 * (config.block_n + block_m) * config.block_k * element_bytes
    return 1 + max(2, min(ceil_div(width, config.block_k), _DEEP_BYTES // sharing // step_bytes))


def _is_together(block_m: int) -> bool:
    """Whether a program sums both halves in one loop: more rows have no registers for it."""
    return block_m == BLOCK_M_CHOICES[0]
