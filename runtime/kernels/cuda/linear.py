"""Dense product on CUDA: pinned tiles, split K reduced in order, no atomics.

Legend: M rows, K input features, N output features, S parts of K.
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
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, GemmConfig, block_m_for, gemm_config

_PARTIAL_BYTES = 1 << 28
REDUCE_BLOCK = 1024


@triton.jit
def gemm_tile(
    x_ptr,
    w_ptr,
    stride_xm,
    stride_wn,
    row_start,
    column_start,
    k_begin,
    k_end,
    num_rows,
    num_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum x @ w.T over k_begin..k_end in steps of BLOCK_K: the one order every product uses."""
    rows = row_start + tl.arange(0, BLOCK_M)
    columns = column_start + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_xm
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * stride_wn
    is_row = (rows < num_rows)[:, None]
    is_column = (columns < num_columns)[None, :]
    return gemm_steps(
        x_rows, w_rows, is_row, is_column, k_begin, k_end, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip


@triton.jit
def gemm_steps(
    x_rows,
    w_rows,
    is_row,
    is_column,
    k_begin,
    k_end,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum the products of rows [BLOCK_M, 1] and [1, BLOCK_N] that pointers name."""
    steps = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        ks = k + steps
        is_k = ks < k_end
        x = tl.load(x_rows + ks[None, :], mask=is_row & is_k[None, :], other=0.0)
        w = tl.load(w_rows + ks[:, None], mask=is_column & is_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    num_features,
    split_features,
    stride_xm,
    stride_wn,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of one part of K; out is [S, M, N], float32 partials when S > 1."""
    row_start = tl.program_id(0) * BLOCK_M
    column_start = tl.program_id(1) * BLOCK_N
    part = tl.program_id(2)
    k_begin = part * split_features
    k_end = tl.minimum(k_begin + split_features, num_features)
    if OVERLAP:  # it may begin a forward: see IS_OVERLAPPING
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = gemm_tile(
        x_ptr, w_ptr, stride_xm, stride_wn, row_start, column_start, k_begin, k_end,
        num_rows, num_columns, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    rows = row_start + tl.arange(0, BLOCK_M)
    columns = column_start + tl.arange(0, BLOCK_N)
    is_column = columns < num_columns
    if SCALED:
        acc = acc * tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
        acc = acc + bias[None, :]
    out_rows = (part.to(tl.int64) * num_rows + rows) * num_columns
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    out = out_ptr + out_rows[:, None] + columns[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def reduce_parts_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add the parts 0..S-1 of a row in that order, then the bias, and round once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(partial_ptr + row * num_columns + columns, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT_K):
        offset = (row + part * num_rows.to(tl.int64)) * num_columns
        total += tl.load(partial_ptr + offset + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = out_ptr + row * num_columns + columns
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def launch_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    scale_M: torch.Tensor | None = None,
    config: GemmConfig | None = None,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Launch `linear`; `config` replaces the pinned tile (heads, tests, tuning).

    `scale_M` is a float32 factor of each row's product (heads); `overlap` replaces the choice for
    the architecture.
    """
    num_rows, num_features = x_MK.shape
    num_columns = weight_NK.shape[0]
    assert weight_NK.shape[1] == num_features, "weight and rows disagree on K"
    if config is None:
        config = gemm_config(
            num_columns,
            num_features,
            element_bytes=x_MK.element_size(),
            arch=device_arch(x_MK.device),
        )
    out = torch.empty((num_rows, num_columns), dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    x_MK, weight_NK = inner_contiguous(x_MK), inner_contiguous(weight_NK)
    # Chunks bound the partials of a long prefill; rows are independent, so cuts change no bits.
    chunk = num_rows
    if config.split_k > 1:
        largest = max(BLOCK_M_CHOICES)
        fitting = _PARTIAL_BYTES // (config.split_k * num_columns * 4)
        chunk = max(largest, fitting // largest * largest)
    for start in range(0, num_rows, max(chunk, 1)):
        rows = slice(start, min(start + chunk, num_rows))
        scale = None if scale_M is None else scale_M[rows]
        _launch_rows(x_MK[rows], weight_NK, bias_N, scale, out[rows], config, overlap)
    return out


def _launch_rows(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    scale_M: torch.Tensor | None,
    out_MN: torch.Tensor,
    config: GemmConfig,
    overlap: bool | None,
) -> None:
    num_rows, num_features = x_MK.shape
    num_columns = weight_NK.shape[0]
    block_m = block_m_for(num_rows)
    is_split = config.split_k > 1
    assert scale_M is None or not (is_split or bias_N is not None), "heads have one part, no bias"
    is_overlapping, options = overlap_options(x_MK.device, overlap)
    target = out_MN
    if is_split:
        shape = (config.split_k, num_rows, num_columns)
        target = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    grid = (
        ceil_div(num_rows, block_m),
        ceil_div(num_columns, config.block_n),
        config.split_k,
    )
    linear_kernel[grid](
        x_MK,
        weight_NK,
        bias_N if bias_N is not None else weight_NK,
        scale_M if scale_M is not None else weight_NK,
        target,
        num_rows,
        num_columns,
        num_features,
        split_features(num_features, config),
        x_MK.stride(0),
        weight_NK.stride(0),
        **linear_constants(config, block_m, has_bias=bias_N is not None and not is_split),
        SCALED=scale_M is not None,
        OVERLAP=is_overlapping,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    if is_split:
        reduce_parts_kernel[(num_rows, ceil_div(num_columns, REDUCE_BLOCK))](
            target,
            bias_N if bias_N is not None else weight_NK,
            out_MN,
            num_rows,
            num_columns,
            SPLIT_K=config.split_k,
            HAS_BIAS=bias_N is not None,
            BLOCK=REDUCE_BLOCK,
            OVERLAP=is_overlapping,
            num_warps=4,
            **options,
        )


def split_features(num_features: int, config: GemmConfig) -> int:
    """Return the input features of one part of K, whole steps of BLOCK_K."""
    steps = ceil_div(ceil_div(num_features, config.split_k), config.block_k)
    return steps * config.block_k


def linear_constants(config: GemmConfig, block_m: int, *, has_bias: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of `linear_kernel`."""
    return {
        "HAS_BIAS": has_bias,
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
