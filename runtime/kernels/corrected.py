"""The greedy choice from logits that are known and a correction of low rank that is not.

The correction is a product of one row with a weight over the head's ids, as in `head_logits`; the
logits of a Markov head's slot are the slot's own, known for a whole block, and that.

Legend: M rows, D rank of the correction, X rows of a table, V ids of the head.
"""

from __future__ import annotations

import torch

from runtime.kernels.embedding import embed
from runtime.kernels.head import argmax_lowest, head_logits_twin, named_ids


def corrected_argmax(
    logits_MV: torch.Tensor,
    rows_XD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    ids_M: torch.Tensor | None = None,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the highest corrected logit of each row, the lowest id among equals.

    Args:
        logits_MV: float32, before the correction; rows may lie apart.
        rows_XD: [M, D], one for each row of logits; with `ids_M` a table [X, D].
        weight_VD: [V, D], dtype of `rows_XD`.
        ids_M: int64, below X: the rows of the table; None: `rows_XD` are the rows.
        names_V: as in `head_argmax`.
        copy_M: as in `head_argmax`.

    Returns:
        (ids int64 [M], contiguous, of the head's vocabulary or their names; corrected logit
        float32 [M]).

    Exactness: a corrected logit is the float32 sum of the logit and of what `head_logits` makes of
    the row and the weight, rounded once.
    Graph-safe: yes (CUDA).
    """
    if logits_MV.is_cuda:
        from runtime.kernels.cuda.corrected import launch_corrected_argmax

        return launch_corrected_argmax(
            logits_MV, rows_XD, weight_VD, ids_M=ids_M, names_V=names_V, copy_M=copy_M
        )
    return corrected_argmax_twin(
        logits_MV, rows_XD, weight_VD, ids_M=ids_M, names_V=names_V, copy_M=copy_M
    )


def corrected_argmax_twin(
    logits_MV: torch.Tensor,
    rows_XD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    ids_M: torch.Tensor | None = None,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `corrected_argmax` with torch."""
    rows_MD = rows_XD if ids_M is None else embed(ids_M, rows_XD)
    chosen_M, best_M = argmax_lowest(logits_MV + head_logits_twin(rows_MD, weight_VD))
    return named_ids(chosen_M, names_V, copy_M), best_M
