"""The residual stream between dense layers, in the form that lets products absorb the norms.

Whatever writes the stream (an embedding lookup, o_proj, down_proj) also writes the stream times the
weight of the norm that comes next, and the sums of squares of tiles of the row. The product that
follows multiplies the former and scales its accumulator by the row's root mean square, so no kernel
stands between two products and no row is read twice.

Rounding points: the stream is rounded to the storage dtype; its product with the norm weight is
rounded once; squares, their sums and the scale are float32.

Legend: M rows, D width, T tiles of a row, V rows of an embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.rows import tree_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """The residual stream at a norm, rows first.

    Args:
        residual_MD: the stream itself.
        weighted_MD: the stream times the norm's weight, rounded once.
        squares_MT: float32, sum of squares of each tile of `square_tile(D)` elements of the stream.
    """

    residual_MD: torch.Tensor
    weighted_MD: torch.Tensor
    squares_MT: torch.Tensor


def square_tile(width: int) -> int:
    """Return the elements of a row that share one sum of squares: a function of the width alone.

    Products that write a stream take whole tiles, so their BLOCK_N may vary without moving a sum.
    """
    return 16 if width <= 2048 else 32


def num_square_tiles(width: int) -> int:
    """Return T for rows of a width."""
    return -(-width // square_tile(width))


def enter_stream(residual_MD: torch.Tensor, norm_D: torch.Tensor) -> Stream:
    """Make a stream of rows that no product wrote.

    Args:
        residual_MD: [M, D].
        norm_D: [D], weight of the norm that comes next.

    Exactness: the squares have the bits that `residual_linear` gives for the same row.
    Graph-safe: yes (CUDA).
    """
    if residual_MD.is_cuda:
        from runtime.kernels.cuda.stream import launch_enter_stream

        return launch_enter_stream(residual_MD, norm_D)
    return enter_stream_twin(residual_MD, norm_D)


def embed_stream(
    ids_M: torch.Tensor,
    table_VD: torch.Tensor,
    norm_D: torch.Tensor,
    out_MD: torch.Tensor | None = None,
) -> Stream:
    """Look tokens up and enter the stream with their rows.

    Args:
        ids_M: int64, vocabulary of the table.
        table_VD: [V, D].
        norm_D: [D], weight of the norm that comes next.
        out_MD: takes the rows themselves, with any stride between them; None: they lie anywhere.

    Exactness: as `enter_stream`.
    Graph-safe: yes (CUDA).
    """
    if ids_M.is_cuda:
        from runtime.kernels.cuda.stream import launch_embed_stream

        return launch_embed_stream(ids_M, table_VD, norm_D, out_MD=out_MD)
    rows_MD = torch.index_select(table_VD, 0, ids_M)
    return enter_stream_twin(rows_MD if out_MD is None else out_MD.copy_(rows_MD), norm_D)


def enter_stream_twin(residual_MD: torch.Tensor, norm_D: torch.Tensor) -> Stream:
    """Compute `enter_stream` with torch."""
    values = residual_MD.float()
    tile, count = square_tile(values.shape[1]), num_square_tiles(values.shape[1])
    padded = torch.nn.functional.pad(values * values, (0, count * tile - values.shape[1]))
    return Stream(
        residual_MD=residual_MD,
        weighted_MD=(values * norm_D.float()).to(residual_MD.dtype),
        squares_MT=tree_sum(padded.unflatten(1, (count, tile))).squeeze(2),
    )
