"""Products that read or write the residual stream on CUDA: one kernel each, one part of K.

A program sums its tile over K in one accumulator, as `runtime.kernels.cuda.linear` does, then
scales or adds in the epilogue. Weights do not depend on the kernel before; where launches overlap
they are fetched while it ends.

Legend: M rows, K input features, N output features, D stream width, T square tiles.
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
    power_of_two,
)
from runtime.kernels.cuda.stream import empty_stream, fold_columns, rounded_square
from runtime.kernels.fused_table import FusedConfig, fused_config, preloads
from runtime.kernels.stream import Stream, num_square_tiles, square_tile
from runtime.kernels.tile_rules import block_m_for

PREFETCH_FEATURES = 2048  # of a weight row, so that a large weight does not sweep the L2
LINE_ELEMENTS = tl.constexpr(64)  # of two bytes, in a 128-byte line


@triton.jit
def prefetch_lines(pointers):
    """Bring the lines of some addresses into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _early_weights(
    w_rows, is_column,
    FEATURES: tl.constexpr, BLOCK_K: tl.constexpr, PRELOAD: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Load a program's weights whole, or bring them near; nothing here awaits other kernels."""
    weights = ()
    if PRELOAD:
        steps = tl.arange(0, BLOCK_K)
        for step in tl.static_range(0, FEATURES // BLOCK_K):
            w = tl.load(
                w_rows + (step * BLOCK_K + steps)[:, None], mask=is_column[None, :], other=0.0
            )
            weights = weights + (w,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    elif PREFETCH > 0:
        lines = tl.arange(0, BLOCK_K // LINE_ELEMENTS) * LINE_ELEMENTS
        for k in range(0, PREFETCH, BLOCK_K):
            prefetch_lines(w_rows + (k + lines)[:, None])
    return weights


@triton.jit
def _sum_products(
    x_rows, w_rows, weights, is_row, is_column,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRELOAD: tl.constexpr,
):  # fmt: skip
    """Sum x @ w.T over K in steps of BLOCK_K, in one accumulator."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    steps = tl.arange(0, BLOCK_K)
    if PRELOAD:
        rows = ()
        for step in tl.static_range(0, FEATURES // BLOCK_K):
            x = tl.load(x_rows + (step * BLOCK_K + steps)[None, :], mask=is_row[:, None], other=0.0)
            rows = rows + (x,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
        for step in tl.static_range(0, FEATURES // BLOCK_K):
            acc = tl.dot(rows[step], weights[step], acc, input_precision="ieee")
    else:
        for k in tl.range(0, FEATURES, BLOCK_K, num_stages=STAGES):
            ks = k + steps
            if FEATURES % BLOCK_K == 0:
                x = tl.load(x_rows + ks[None, :], mask=is_row[:, None], other=0.0)
                w = tl.load(w_rows + ks[:, None], mask=is_column[None, :], other=0.0)
            else:
                is_k = ks < FEATURES
                x = tl.load(x_rows + ks[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
                w = tl.load(
                    w_rows + ks[:, None], mask=is_column[None, :] & is_k[:, None], other=0.0
                )
            acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def scaled_linear_kernel(
    x_ptr, w_ptr, squares_ptr, bias_ptr, out_ptr, eps, num_rows,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRELOAD: tl.constexpr, PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the product of normalised rows; gated, pairs of columns become one."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = columns < COLUMNS
    rows64 = rows.to(tl.int64)
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * FEATURES
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    weights = _early_weights(w_rows, is_column, FEATURES, BLOCK_K, PRELOAD, PREFETCH)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    tiles = tl.arange(0, BLOCK_T)
    squares = tl.load(
        squares_ptr + rows64[:, None] * TILES + tiles[None, :],
        mask=is_row[:, None] & (tiles < TILES)[None, :],
        other=0.0,
    )
    acc = _sum_products(
        x_ptr + rows64[:, None] * FEATURES, w_rows, weights, is_row, is_column,
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRELOAD,
    )  # fmt: skip
    total = fold_columns(squares, BLOCK_M, BLOCK_T)
    # Contractions are written out, so that every tile shape makes the same ones.
    scale = tl.rsqrt(tl.fma(total, tl.full((BLOCK_M,), 1.0 / FEATURES, tl.float32), eps))
    if HAS_BIAS:
        y = tl.fma(
            acc,
            tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_N)),
            tl.broadcast_to(bias[None, :], (BLOCK_M, BLOCK_N)),
        )
    else:
        y = acc * scale[:, None]
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        columns = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out = out_ptr + rows64[:, None] * (COLUMNS // 2) + columns[None, :]
        is_column = columns < COLUMNS // 2
    else:
        out = out_ptr + rows64[:, None] * COLUMNS + columns[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def residual_linear_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, weighted_ptr, squares_ptr,
    num_rows, stride_xm, stride_rm,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, TILES: tl.constexpr, SQUARE_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRELOAD: tl.constexpr, PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the stream after the product: itself, times the next norm, squares summed."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = columns < COLUMNS
    mask = is_row[:, None] & is_column[None, :]
    rows64 = rows.to(tl.int64)
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * FEATURES
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    weights = _early_weights(w_rows, is_column, FEATURES, BLOCK_K, PRELOAD, PREFETCH)
    norm = tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    residual = tl.load(
        residual_ptr + rows64[:, None] * stride_rm + columns[None, :], mask=mask, other=0.0
    )
    acc = _sum_products(
        x_ptr + rows64[:, None] * stride_xm, w_rows, weights, is_row, is_column,
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRELOAD,
    )  # fmt: skip
    if HAS_BIAS:
        acc = acc + bias[None, :]
    out_offsets = rows64[:, None] * COLUMNS + columns[None, :]
    stream = (acc + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets, stream, mask=mask)
    value = stream.to(tl.float32)
    weighted = (value * norm[None, :]).to(weighted_ptr.dtype.element_ty)
    tl.store(weighted_ptr + out_offsets, weighted, mask=mask)
    PARTS: tl.constexpr = BLOCK_N // SQUARE_TILE
    value = tl.where(is_column[None, :], value, 0.0)
    squares = tl.reshape(rounded_square(value), (BLOCK_M * PARTS, SQUARE_TILE))
    sums = tl.reshape(fold_columns(squares, BLOCK_M * PARTS, SQUARE_TILE), (BLOCK_M, PARTS))
    tiles = tile * PARTS + tl.arange(0, PARTS)
    tl.store(
        squares_ptr + rows64[:, None] * TILES + tiles[None, :],
        sums,
        mask=is_row[:, None] & (tiles < TILES)[None, :],
    )


def launch_scaled_linear(
    stream: Stream,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    eps: float,
    is_gated: bool = False,
    config: FusedConfig | None = None,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Launch `scaled_linear`; `config` and `overlap` replace the pinned choices (tests, tuning)."""
    x_MK = stream.weighted_MD.contiguous()
    num_rows, num_features = x_MK.shape
    num_columns = weight_NK.shape[0]
    assert weight_NK.shape[1] == num_features, "weight and stream disagree on K"
    assert weight_NK.is_contiguous(), "weights are read row by row"
    out = torch.empty(
        (num_rows, num_columns // 2 if is_gated else num_columns),
        dtype=x_MK.dtype,
        device=x_MK.device,
    )
    if num_rows == 0:
        return out
    if config is None:
        config = fused_config(
            "gated" if is_gated else "scaled",
            num_columns,
            num_features,
            element_bytes=x_MK.element_size(),
            arch=device_arch(x_MK.device),
        )
    block_m = block_m_for(num_rows)
    is_overlapping, options = overlap_options(x_MK.device, overlap)
    scaled_linear_kernel[(ceil_div(num_columns, config.block_n), ceil_div(num_rows, block_m))](
        x_MK,
        weight_NK,
        stream.squares_MT.contiguous(),
        bias_N if bias_N is not None else weight_NK,
        out,
        eps,
        num_rows,
        HAS_BIAS=bias_N is not None,
        GATED=is_gated,
        **scaled_constants(num_features),
        **tile_constants(
            num_columns,
            num_features,
            config,
            block_m,
            element_bytes=x_MK.element_size(),
            is_overlapping=is_overlapping,
        ),
        num_warps=config.num_warps,
        **options,
    )
    return out


def launch_residual_linear(
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
    config: FusedConfig | None = None,
    overlap: bool | None = None,
) -> Stream:
    """Launch `residual_linear`; `config` and `overlap` as in `launch_scaled_linear`."""
    x_MK, residual_MD = inner_contiguous(x_MK), inner_contiguous(residual_MD)
    num_rows, num_features = x_MK.shape
    num_columns = weight_DK.shape[0]
    assert weight_DK.shape[1] == num_features, "weight and rows disagree on K"
    assert weight_DK.is_contiguous(), "weights are read row by row"
    stream = empty_stream(num_rows, residual_MD)
    if num_rows == 0:
        return stream
    if config is None:
        config = fused_config(
            "residual",
            num_columns,
            num_features,
            element_bytes=x_MK.element_size(),
            arch=device_arch(x_MK.device),
        )
    assert config.block_n % square_tile(num_columns) == 0, "a program writes whole square tiles"
    block_m = block_m_for(num_rows)
    is_overlapping, options = overlap_options(x_MK.device, overlap)
    residual_linear_kernel[(ceil_div(num_columns, config.block_n), ceil_div(num_rows, block_m))](
        x_MK,
        weight_DK,
        bias_D if bias_D is not None else weight_DK,
        residual_MD,
        norm_D,
        stream.residual_MD,
        stream.weighted_MD,
        stream.squares_MT,
        num_rows,
        x_MK.stride(0),
        residual_MD.stride(0),
        HAS_BIAS=bias_D is not None,
        **residual_constants(num_columns),
        **tile_constants(
            num_columns,
            num_features,
            config,
            block_m,
            element_bytes=x_MK.element_size(),
            is_overlapping=is_overlapping,
        ),
        num_warps=config.num_warps,
        **options,
    )
    return stream


def scaled_constants(num_features: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the width of the stream read."""
    tiles = num_square_tiles(num_features)
    return {"TILES": tiles, "BLOCK_T": power_of_two(tiles)}


def residual_constants(num_columns: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the width of the stream written."""
    return {"TILES": num_square_tiles(num_columns), "SQUARE_TILE": square_tile(num_columns)}


def tile_constants(
    num_columns: int,
    num_features: int,
    config: FusedConfig,
    block_m: int,
    *,
    element_bytes: int,
    is_overlapping: bool,
) -> dict[str, int | bool]:
    """Return the compile-time arguments that both products share."""
    preload = preloads(config, block_m, num_features, element_bytes)
    can_prefetch = is_overlapping and not preload and element_bytes == 2
    whole_steps = min(num_features, PREFETCH_FEATURES) // config.block_k * config.block_k
    return {
        "COLUMNS": num_columns,
        "FEATURES": num_features,
        "BLOCK_M": block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "PRELOAD": preload,
        "PREFETCH": whole_steps if can_prefetch and config.block_k >= 64 else 0,
        "OVERLAP": is_overlapping,
    }
