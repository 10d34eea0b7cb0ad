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

import torch

from runtime.kernels.norm import RowNorm, weigh_rows_twin
from runtime.kernels.rows import ROW_TILE, pad_rows

COLUMN_TILE = 2048
"""Head rows of every CPU product; fewer are padded with zeros."""


def head_logits(
    x_MD: torch.Tensor, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> torch.Tensor:
    """Compute the head's logits.

    Args:
        x_MD: [M, D].
        weight_VD: [V, D], dtype of `x_MD`.
        norm: of the rows before the product, or None.

    Returns:
        float32 [M, V].

    Exactness: as `linear`, never rounded below float32. With a norm, rows times its weight are
    rounded once, and a row's scale multiplies its finished sums.
    Graph-safe: yes (CUDA).
    """
    if x_MD.is_cuda:
        from runtime.kernels.cuda.head import launch_head_logits

        return launch_head_logits(x_MD, weight_VD, norm)
    return head_logits_twin(x_MD, weight_VD, norm)


def head_argmax(
    x_MD: torch.Tensor, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the highest logit of each row, the lowest id among equals.

    Args:
        x_MD: [M, D].
        weight_VD: [V, D], dtype of `x_MD`.
        norm: of the rows before the product, or None.

    Returns:
        (ids int64 [M] in the head's vocabulary, logit float32 [M]).

    Exactness: the logit has the bits of `head_logits`.
    Graph-safe: yes (CUDA).
    """
    if x_MD.is_cuda:
        from runtime.kernels.cuda.head import launch_head_argmax

        return launch_head_argmax(x_MD, weight_VD, norm)
    return head_argmax_twin(x_MD, weight_VD, norm)


def head_logits_twin(
    x_MD: torch.Tensor, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> torch.Tensor:
    """Compute `head_logits` with torch on fixed tiles of ROW_TILE rows and COLUMN_TILE columns."""
    if norm is not None:
        weighted_MD, scale_M1 = weigh_rows_twin(x_MD, norm)
        return head_logits_twin(weighted_MD, weight_VD) * scale_M1
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
    x_MD: torch.Tensor, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `head_argmax` with torch, ROW_TILE rows of logits at a time."""
    ids = [torch.empty(0, dtype=torch.int64)]
    logits = [torch.empty(0, dtype=torch.float32)]
    for start in range(0, x_MD.shape[0], ROW_TILE):
        tile_ids, tile_logits = argmax_lowest(
            head_logits_twin(x_MD[start : start + ROW_TILE], weight_VD, norm)
        )
        ids.append(tile_ids)
        logits.append(tile_logits)
    return torch.cat(ids), torch.cat(logits)


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
