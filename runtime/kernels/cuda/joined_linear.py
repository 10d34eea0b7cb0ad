"""Product of two normed rows side by side on CUDA: one kernel, halves of K one after the other.

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
from runtime.kernels.cuda.linear import gemm_steps
from runtime.kernels.cuda.normed_rows import row_scale, sum_normed_rows
from runtime.kernels.cuda.products import LINE_ELEMENTS, PREFETCH_FEATURES, prefetch_lines
from runtime.kernels.fused_table import FusedConfig, fitting_stages, fused_config
from runtime.kernels.gemm_table import block_m_for
from runtime.kernels.joined_linear import RowHalf


@triton.jit
def _half_product(
    x_ptr, ids_ptr, norm_ptr, w_rows, rows, is_row, is_column, eps, mean_factor, stride_xm,
    WIDTH: tl.constexpr, GATHERED: tl.constexpr, NORMED: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a half's sums and, NORMED, the rows' scales (else ones)."""
    sources = rows
    if GATHERED:
        sources = tl.load(ids_ptr + rows, mask=is_row, other=0)
    x_rows = (x_ptr + sources * stride_xm)[:, None]
    if NORMED:
        acc, squares = sum_normed_rows(
            x_rows, norm_ptr, w_rows, is_row[:, None], is_column, WIDTH, STAGES,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        scale = row_scale(squares, eps, mean_factor, BLOCK_M, BLOCK_K)
    else:
        acc = gemm_steps(
            x_rows, w_rows, is_row[:, None], is_column, 0, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K
        )
        scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    return acc, tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_N))


@triton.jit(do_not_specialize=["num_rows"])
def joined_linear_kernel(
    first_ptr, first_ids_ptr, first_norm_ptr, second_ptr, second_ids_ptr, second_norm_ptr,
    w_ptr, bias_ptr, out_ptr, first_eps, second_eps, mean_factor,
    num_rows, stride_first, stride_second,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    FIRST_GATHERED: tl.constexpr, FIRST_NORMED: tl.constexpr,
    SECOND_GATHERED: tl.constexpr, SECOND_NORMED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
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
    y, scale = _half_product(
        first_ptr, first_ids_ptr, first_norm_ptr, w_rows, rows, is_row, is_column,
        first_eps, mean_factor, stride_first,
        WIDTH, FIRST_GATHERED, FIRST_NORMED, STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    # A product with a rounding of its own: what follows must not contract it.
    y = tl.fma(y, scale, tl.zeros_like(y))
    acc, scale = _half_product(
        second_ptr, second_ids_ptr, second_norm_ptr, w_rows + WIDTH, rows, is_row, is_column,
        second_eps, mean_factor, stride_second,
        WIDTH, SECOND_GATHERED, SECOND_NORMED, STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    y = tl.fma(acc, scale, y)
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
        "STAGES": fitting_stages(config, block_m, element_bytes),
        "PREFETCH": whole_steps if can_prefetch else 0,
        "OVERLAP": is_overlapping,
    }
