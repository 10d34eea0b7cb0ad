"""Entry into the residual stream on CUDA, and the summation tree that its writers share.

Legend: M rows, D width, T square tiles, V rows of an embedding table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, overlap_options, power_of_two
from runtime.kernels.stream import Stream, num_square_tiles, square_tile


@triton.jit
def _add_neighbours(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
    return even + odd


@triton.jit
def fold_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum [ROWS, COLUMNS] over columns by adding neighbours: one tree, whatever the layout.

    `tl.sum` would follow the layout, which follows BLOCK_M and the number of warps.
    """
    if COLUMNS >= 2048:
        x = _add_neighbours(x, ROWS, 1024)
    if COLUMNS >= 1024:
        x = _add_neighbours(x, ROWS, 512)
    if COLUMNS >= 512:
        x = _add_neighbours(x, ROWS, 256)
    if COLUMNS >= 256:
        x = _add_neighbours(x, ROWS, 128)
    if COLUMNS >= 128:
        x = _add_neighbours(x, ROWS, 64)
    if COLUMNS >= 64:
        x = _add_neighbours(x, ROWS, 32)
    if COLUMNS >= 32:
        x = _add_neighbours(x, ROWS, 16)
    if COLUMNS >= 16:
        x = _add_neighbours(x, ROWS, 8)
    if COLUMNS >= 8:
        x = _add_neighbours(x, ROWS, 4)
    if COLUMNS >= 4:
        x = _add_neighbours(x, ROWS, 2)
    if COLUMNS >= 2:
        even, odd = tl.split(tl.reshape(x, (ROWS, 2)))
        x = even + odd
    return tl.reshape(x, (ROWS,))


@triton.jit
def rounded_square(x):
    """Square with a rounding of its own: a sum that contracts it would follow the layout."""
    return tl.fma(x, x, tl.zeros_like(x))


@triton.jit
def load_squares(squares_ptr, rows, is_row, TILES: tl.constexpr, BLOCK_T: tl.constexpr):
    """Load the squares [M, BLOCK_T] of the tiles of a stream's rows."""
    tiles = tl.arange(0, BLOCK_T)
    return tl.load(
        squares_ptr + rows.to(tl.int64)[:, None] * TILES + tiles[None, :],
        mask=is_row[:, None] & (tiles < TILES)[None, :],
        other=0.0,
    )


@triton.jit
def stream_scale(
    squares, eps, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Return 1 / root mean square of rows from the squares of their tiles."""
    total = fold_columns(squares, BLOCK_M, BLOCK_T)
    # The contraction is written out, so that every kernel and tile shape makes the same one.
    return tl.rsqrt(tl.fma(total, tl.full((BLOCK_M,), 1.0 / FEATURES, tl.float32), eps))


@triton.jit
def enter_stream_kernel(
    ids_ptr,
    x_ptr,
    norm_ptr,
    residual_ptr,
    weighted_ptr,
    squares_ptr,
    stride_xm,
    stride_rm,
    GATHER: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARE_TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Weight one row and sum its squares; gathered, also copy it from the table to the stream."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_T)
    columns = tiles[:, None] * SQUARE_TILE + tl.arange(0, SQUARE_TILE)[None, :]
    mask = columns < WIDTH
    norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if OVERLAP:  # a forward begins here: see IS_OVERLAPPING
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = tl.load(ids_ptr + row) if GATHER else row
    x = tl.load(x_ptr + source * stride_xm + columns, mask=mask, other=0.0)
    if GATHER:
        tl.store(residual_ptr + row * stride_rm + columns, x, mask=mask)
    value = x.to(tl.float32)
    weighted = (value * norm).to(weighted_ptr.dtype.element_ty)
    tl.store(weighted_ptr + row * WIDTH + columns, weighted, mask=mask)
    squares = fold_columns(rounded_square(value), BLOCK_T, SQUARE_TILE)
    tl.store(squares_ptr + row * TILES + tiles, squares, mask=tiles < TILES)


def launch_enter_stream(
    residual_MD: torch.Tensor, norm_D: torch.Tensor, *, overlap: bool | None = None
) -> Stream:
    """Launch `enter_stream`; `overlap` replaces the architecture's choice (tests, tuning)."""
    residual_MD = inner_contiguous(residual_MD)
    stream = empty_stream(residual_MD.shape[0], residual_MD, residual_MD=residual_MD)
    _launch(None, residual_MD, norm_D, stream, overlap)
    return stream


def launch_embed_stream(
    ids_M: torch.Tensor,
    table_VD: torch.Tensor,
    norm_D: torch.Tensor,
    *,
    out_MD: torch.Tensor | None = None,
    overlap: bool | None = None,
) -> Stream:
    """Launch `embed_stream`; `overlap` as in `launch_enter_stream`."""
    assert out_MD is None or out_MD.stride(1) == 1, "a row of the stream is written in one piece"
    stream = empty_stream(ids_M.shape[0], table_VD, residual_MD=out_MD)
    _launch(ids_M, inner_contiguous(table_VD), norm_D, stream, overlap)
    return stream


def empty_stream(
    num_rows: int, like_XD: torch.Tensor, *, residual_MD: torch.Tensor | None = None
) -> Stream:
    """Allocate the stream of `num_rows` rows as wide as `like_XD`; a given residual is kept."""
    width, dtype, device = like_XD.shape[1], like_XD.dtype, like_XD.device
    if residual_MD is None:
        residual_MD = torch.empty((num_rows, width), dtype=dtype, device=device)
    return Stream(
        residual_MD=residual_MD,
        weighted_MD=torch.empty((num_rows, width), dtype=dtype, device=device),
        squares_MT=torch.empty(
            (num_rows, num_square_tiles(width)), dtype=torch.float32, device=device
        ),
    )


def _launch(
    ids_M: torch.Tensor | None,
    x_XD: torch.Tensor,
    norm_D: torch.Tensor,
    stream: Stream,
    overlap: bool | None,
) -> None:
    num_rows, width = stream.residual_MD.shape
    if num_rows == 0:
        return
    is_overlapping, options = overlap_options(x_XD.device, overlap)
    enter_stream_kernel[(num_rows,)](
        ids_M if ids_M is not None else x_XD,
        x_XD,
        norm_D,
        stream.residual_MD,
        stream.weighted_MD,
        stream.squares_MT,
        x_XD.stride(0),
        stream.residual_MD.stride(0),
        GATHER=ids_M is not None,
        OVERLAP=is_overlapping,
        **stream_constants(width),
        num_warps=4,
        **options,
    )


def stream_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the stream's width."""
    tiles = num_square_tiles(width)
    return {
        "WIDTH": width,
        "SQUARE_TILE": square_tile(width),
        "TILES": tiles,
        "BLOCK_T": power_of_two(tiles),
    }


def scale_constants(num_features: int) -> dict[str, int]:
    """Return the compile-time arguments of `stream_scale` that follow the width."""
    tiles = num_square_tiles(num_features)
    return {"TILES": tiles, "BLOCK_T": power_of_two(tiles)}
