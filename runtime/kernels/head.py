"""Logits of a head and the greedy choice from them.

The choice compares (float32 logit, lowest id): ties go to the lowest id in every path, and a NaN
logit is never chosen. On CUDA the fused argmax forms each logit by the same sums as `head_logits`,
and head tiles are pinned by K alone, so a head made of a subset of another's rows gives the same
bits for the ids they share. On the CPU every product has COLUMN_TILE columns, because a BLAS
library may sum in another order for a narrower weight; that a column's bits do not depend on its
place in the tile is a property of the library, which the tests measure.

Legend: M rows, D width, V head rows (target or draft vocabulary, whichever the weight is of).
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from runtime.kernels.norm import RowNorm
from runtime.kernels.rows import ROW_TILE, pad_rows, tree_sum
from runtime.kernels.stream import Stream, enter_stream_twin

HeadRows: TypeAlias = torch.Tensor | Stream
"""What a head reads: rows [M, D], or their stream at the head's norm, which spares the entry."""

COLUMN_TILE = 2048
"""Head rows of every CPU product; fewer are padded with zeros."""


def head_logits(
    x_MD: HeadRows, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> torch.Tensor:
    """Compute the head's logits.

    Args:
        x_MD: [M, D]; a stream needs its norm, and gives the bits of its residual.
        weight_VD: [V, D], dtype of `x_MD`.
        norm: of the rows before the product, or None.

    Returns:
        float32 [M, V].

    Exactness: as `linear`, never rounded below float32. With a norm, rows times its weight are
    rounded once, and a row's scale multiplies its finished sums.
    Graph-safe: yes (CUDA).
    """
    if plain_rows(x_MD).is_cuda:
        from runtime.kernels.cuda.head import launch_head_logits

        return launch_head_logits(x_MD, weight_VD, norm)
    return head_logits_twin(x_MD, weight_VD, norm)


def head_argmax(
    x_MD: HeadRows,
    weight_VD: torch.Tensor,
    norm: RowNorm | None = None,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the highest logit of each row, the lowest id among equals.

    Args:
        x_MD: as in `head_logits`.
        weight_VD: [V, D], dtype of `x_MD`.
        norm: of the rows before the product, or None.
        names_V: int64, what the head's ids are called elsewhere (the target ids of a draft's);
            None: their numbers. A name decides nothing.
        copy_M: int64 [M] with any stride, takes the ids, too; None: nobody does.

    Returns:
        (ids int64 [M], contiguous, of the head's vocabulary or their names; logit float32 [M]).

    Exactness: the logit has the bits of `head_logits`.
    Graph-safe: yes (CUDA).
    """
    if plain_rows(x_MD).is_cuda:
        from runtime.kernels.cuda.head import launch_head_argmax

        return launch_head_argmax(x_MD, weight_VD, norm, names_V=names_V, copy_M=copy_M)
    ids_M, logits_M = head_argmax_twin(x_MD, weight_VD, norm)
    return named_ids(ids_M, names_V, copy_M), logits_M


def logits_argmax(
    logits_MV: torch.Tensor,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the highest logit of each row, the lowest id among equals.

    Args:
        logits_MV: float32, finished.
        names_V: as in `head_argmax`.
        copy_M: as in `head_argmax`.

    Returns:
        int64 [M], contiguous.

    Exactness: comparisons only.
    Graph-safe: yes (CUDA).
    """
    if logits_MV.is_cuda:
        from runtime.kernels.cuda.head import launch_logits_argmax

        return launch_logits_argmax(logits_MV, names_V, copy_M)
    ids_M, _ = argmax_lowest(logits_MV)
    return named_ids(ids_M, names_V, copy_M)


def named_ids(
    ids_M: torch.Tensor, names_V: torch.Tensor | None, copy_M: torch.Tensor | None
) -> torch.Tensor:
    """Return ids of a head, on the CPU, by their names; `copy_M` takes them, too."""
    if names_V is not None:
        ids_M = names_V[ids_M]
    if copy_M is not None:
        copy_M.copy_(ids_M)
    return ids_M


def plain_rows(x_MD: HeadRows) -> torch.Tensor:
    """Return the rows [M, D] themselves."""
    return x_MD.residual_MD if isinstance(x_MD, Stream) else x_MD


def head_logits_twin(
    x_MD: HeadRows, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> torch.Tensor:
    """Compute `head_logits` with torch on fixed tiles of ROW_TILE rows and COLUMN_TILE columns."""
    if norm is not None:
        entered = x_MD if isinstance(x_MD, Stream) else enter_stream_twin(x_MD, norm.weight_D)
        mean_square_M1 = tree_sum(entered.squares_MT) / weight_VD.shape[1]
        scale_M1 = 1.0 / torch.sqrt(mean_square_M1 + norm.eps)
        return head_logits_twin(entered.weighted_MD, weight_VD) * scale_M1
    assert isinstance(x_MD, torch.Tensor), "a stream needs the norm that it stands at"
    rows = pad_rows(x_MD).float()
    num_columns, width = weight_VD.shape
    out = rows.new_empty((rows.shape[0], num_columns))
    for start in range(0, num_columns, COLUMN_TILE):
        tile = weight_VD[start : start + COLUMN_TILE]
        count = tile.shape[0]
        if count < COLUMN_TILE:
            tile = torch.cat((tile, tile.new_zeros((COLUMN_TILE - count, width))))
        tile_DC = tile.float().t()
        for first in range(0, rows.shape[0], ROW_TILE):
            part = torch.mm(rows[first : first + ROW_TILE], tile_DC)
            out[first : first + ROW_TILE, start : start + count] = part[:, :count]
    return out[: x_MD.shape[0]]


def head_argmax_twin(
    x_MD: HeadRows, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `head_argmax` without names with torch, ROW_TILE rows of logits at a time."""
    ids = [torch.empty(0, dtype=torch.int64)]
    logits = [torch.empty(0, dtype=torch.float32)]
    for start in range(0, plain_rows(x_MD).shape[0], ROW_TILE):
        tile_ids, tile_logits = argmax_lowest(
            head_logits_twin(some_rows(x_MD, slice(start, start + ROW_TILE)), weight_VD, norm)
        )
        ids.append(tile_ids)
        logits.append(tile_logits)
    return torch.cat(ids), torch.cat(logits)


def some_rows(x_MD: HeadRows, part: slice) -> HeadRows:
    """Return some of the rows, in the form that they have."""
    if isinstance(x_MD, torch.Tensor):
        return x_MD[part]
    return Stream(
        residual_MD=x_MD.residual_MD[part],
        weighted_MD=x_MD.weighted_MD[part],
        squares_MT=x_MD.squares_MT[part],
    )


def argmax_lowest(logits_MV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by (logit, lowest id); torch.argmax promises no tie rule.

    Args:
        logits_MV: float32 [M, V]; NaN counts as minus infinity.

    Returns:
        (ids int64 [M], logits float32 [M]).
    """
    best_M1 = logits_MV.amax(dim=-1, keepdim=True)
    if bool(best_M1.isnan().any()):
        logits_MV = logits_MV.nan_to_num(
            nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")
        )
        best_M1 = logits_MV.amax(dim=-1, keepdim=True)
    count = logits_MV.shape[-1]
    ids_V = torch.arange(count, dtype=torch.int32)
    last = torch.tensor(count, dtype=torch.int32)
    ids_M = torch.where(logits_MV == best_M1, ids_V, last).amin(dim=-1)
    return ids_M.to(torch.int64), best_M1.squeeze(-1)
