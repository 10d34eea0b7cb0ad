"""Products that read or write the residual stream on CUDA: one kernel each.

A program sums its tile over K (`runtime.kernels.cuda.products`), then scales or adds in the
epilogue. Weights do not depend on the kernel before; where launches overlap they are fetched while
it ends.

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
)
from runtime.kernels.cuda.products import early_weights, sum_products
from runtime.kernels.cuda.stream import (
    empty_stream,
    fold_columns,
    load_squares,
    rounded_square,
    scale_constants,
    stream_scale,
)
from runtime.kernels.fused_table import FusedConfig, FusedOp, fused_config, part_features
from runtime.kernels.row_tiles import RowTile, row_tile
from runtime.kernels.stream import Stream, num_square_tiles, square_tile


@triton.jit(do_not_specialize=["num_rows"])
def scaled_linear_kernel(
    x_ptr, w_ptr, squares_ptr, bias_ptr, out_ptr, eps, num_rows,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PART_FEATURES: tl.constexpr,
    PRELOAD: tl.constexpr, IN_TURN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the product of normalised rows; gated, pairs of columns become one."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = columns < COLUMNS
    rows64 = rows.to(tl.int64)
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * FEATURES
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()
    weights = early_weights(
        w_rows, is_column[None, :],
        FEATURES, BLOCK_K, PARTS, PART_FEATURES, PRELOAD,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    squares = load_squares(squares_ptr, rows, is_row, TILES, BLOCK_T)
    acc = sum_products(
        x_ptr + rows64[:, None] * FEATURES, w_rows, weights,
        is_row[:, None], is_column[None, :],
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, PART_FEATURES, STAGES, PRELOAD, IN_TURN,
    )  # fmt: skip
    scale = stream_scale(squares, eps, FEATURES, BLOCK_M, BLOCK_T)
    if HAS_BIAS:  # the contraction is written out, so that every tile shape makes the same one
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
    num_rows, stride_xm, stride_rm, stride_om,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, TILES: tl.constexpr, SQUARE_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, PART_FEATURES: tl.constexpr,
    PRELOAD: tl.constexpr, IN_TURN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the stream after the product: itself, times the next norm, squares summed."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = columns < COLUMNS
    mask = is_row[:, None] & is_column[None, :]
    rows64 = rows.to(tl.int64)
    w_rows = w_ptr + columns.to(tl.int64)[None, :] * FEATURES
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()
    weights = early_weights(
        w_rows, is_column[None, :],
        FEATURES, BLOCK_K, PARTS, PART_FEATURES, PRELOAD,
    )  # fmt: skip
    norm = tl.load(norm_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    residual = tl.load(
        residual_ptr + rows64[:, None] * stride_rm + columns[None, :], mask=mask, other=0.0
    )
    acc = sum_products(
        x_ptr + rows64[:, None] * stride_xm, w_rows, weights,
        is_row[:, None], is_column[None, :],
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, PART_FEATURES, STAGES, PRELOAD, IN_TURN,
    )  # fmt: skip
    if HAS_BIAS:
        acc = acc + bias[None, :]
    stream = (acc + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows64[:, None] * stride_om + columns[None, :], stream, mask=mask)
    value = stream.to(tl.float32)
    weighted = (value * norm[None, :]).to(weighted_ptr.dtype.element_ty)
    tl.store(weighted_ptr + rows64[:, None] * COLUMNS + columns[None, :], weighted, mask=mask)
    OWN_TILES: tl.constexpr = BLOCK_N // SQUARE_TILE
    value = tl.where(is_column[None, :], value, 0.0)
    squares = tl.reshape(rounded_square(value), (BLOCK_M * OWN_TILES, SQUARE_TILE))
    sums = tl.reshape(fold_columns(squares, BLOCK_M * OWN_TILES, SQUARE_TILE), (BLOCK_M, OWN_TILES))
    tiles = tile * OWN_TILES + tl.arange(0, OWN_TILES)
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
    tile: RowTile | None = None,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Launch `scaled_linear`; the last three replace what is chosen (tests, tuning)."""
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
    op: FusedOp = "gated" if is_gated else "scaled"
    config, tile = _tiles(op, x_MK, num_columns, config, tile)
    overlapped, options = overlap_options(x_MK.device, overlap, tile.overlap)
    scaled_linear_kernel[(ceil_div(num_rows, tile.block_m), ceil_div(num_columns, tile.block_n))](
        x_MK,
        weight_NK,
        stream.squares_MT.contiguous(),
        bias_N if bias_N is not None else weight_NK,
        out,
        eps,
        num_rows,
        HAS_BIAS=bias_N is not None,
        GATED=is_gated,
        **scale_constants(num_features),
        **tile_constants(num_columns, num_features, config, tile, overlapped=overlapped),
        num_warps=tile.num_warps,
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
    out_MD: torch.Tensor | None = None,
    config: FusedConfig | None = None,
    tile: RowTile | None = None,
    overlap: bool | None = None,
) -> Stream:
    """Launch `residual_linear`; the last three options as of `launch_scaled_linear`."""
    x_MK, residual_MD = inner_contiguous(x_MK), inner_contiguous(residual_MD)
    num_rows, num_features = x_MK.shape
    num_columns = weight_DK.shape[0]
    assert weight_DK.shape[1] == num_features, "weight and rows disagree on K"
    assert weight_DK.is_contiguous(), "weights are read row by row"
    assert out_MD is None or out_MD.stride(1) == 1, "a row of the stream is written in one piece"
    stream = empty_stream(num_rows, residual_MD, residual_MD=out_MD)
    if num_rows == 0:
        return stream
    config, tile = _tiles("residual", x_MK, num_columns, config, tile)
    assert tile.block_n % square_tile(num_columns) == 0, "a program writes whole square tiles"
    overlapped, options = overlap_options(x_MK.device, overlap, tile.overlap)
    residual_linear_kernel[(ceil_div(num_rows, tile.block_m), ceil_div(num_columns, tile.block_n))](
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
        stream.residual_MD.stride(0),
        HAS_BIAS=bias_D is not None,
        **residual_constants(num_columns),
        **tile_constants(num_columns, num_features, config, tile, overlapped=overlapped),
        num_warps=tile.num_warps,
        **options,
    )
    return stream


def _tiles(
    op: FusedOp,
    x_MK: torch.Tensor,
    num_columns: int,
    config: FusedConfig | None,
    tile: RowTile | None,
) -> tuple[FusedConfig, RowTile]:
    num_rows, num_features = x_MK.shape
    size = x_MK.element_size()
    config = config or fused_config(
        op, num_columns, num_features, element_bytes=size, arch=device_arch(x_MK.device)
    )
    chosen = row_tile(op, config, num_columns, num_features, num_rows, element_bytes=size)
    return config, tile or chosen


def residual_constants(num_columns: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the width of the stream written."""
    return {"TILES": num_square_tiles(num_columns), "SQUARE_TILE": square_tile(num_columns)}


def tile_constants(
    num_columns: int,
    num_features: int,
    config: FusedConfig,
    tile: RowTile,
    *,
    overlapped: int,
) -> dict[str, int]:
    """Return the compile-time arguments that both products share."""
    return {
        "COLUMNS": num_columns,
        "FEATURES": num_features,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": tile.num_stages,
        "PARTS": config.parts,
        "PART_FEATURES": part_features(config, num_features),
        "IN_TURN": tile.in_turn,
        "PRELOAD": tile.preload,
        "OVERLAP": overlapped,
    }
