"""The greedy choice among a few head rows that each input row names for itself.

Every logit has the bits that `head_logits` gives it, so what is chosen here may be compared with
the choice of `head_argmax` over other rows of the same weight.

Legend: M rows, D width, V head rows, E named rows of each input row.
"""

from __future__ import annotations

import torch

from runtime.kernels.head import head_logits_twin
from runtime.kernels.norm import RowNorm


def head_rows_argmax(
    x_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_ME: torch.Tensor,
    norm: RowNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the highest logit among the named rows, the lowest id among equals.

    Args:
        x_MD: [M, D].
        weight_VD: [V, D], dtype of `x_MD`.
        ids_ME: int64 in the head's vocabulary; negative entries name nothing.
        norm: as in `head_logits`.

    Returns:
        (ids int64 [M], logit float32 [M]); where nothing is named or every logit is NaN, the logit
        is minus infinity and the id means nothing.

    Exactness: the logit has the bits of `head_logits`.
    Graph-safe: yes (CUDA).
    """
    if x_MD.is_cuda:
        from runtime.kernels.cuda.head_rows import launch_head_rows_argmax

        return launch_head_rows_argmax(x_MD, weight_VD, ids_ME, norm)
    return head_rows_argmax_twin(x_MD, weight_VD, ids_ME, norm)


def head_rows_argmax_twin(
    x_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_ME: torch.Tensor,
    norm: RowNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `head_rows_argmax` with torch, one input row at a time."""
    num_rows, num_named = ids_ME.shape
    if num_rows == 0 or num_named == 0:
        return ids_ME.new_zeros(num_rows), x_MD.new_full(
            (num_rows,), float("-inf"), dtype=torch.float32
        )
    logits_ME = torch.cat(
        [
            head_logits_twin(x_MD[m : m + 1], weight_VD[ids_ME[m].clamp(min=0)], norm)
            for m in range(num_rows)
        ]
    )
    is_candidate_ME = (ids_ME >= 0) & ~logits_ME.isnan()
    logits_ME = torch.where(is_candidate_ME, logits_ME, float("-inf"))
    best_M1 = logits_ME.amax(dim=1, keepdim=True)
    is_best_ME = is_candidate_ME & (logits_ME == best_M1)
    ids_M = torch.where(is_best_ME, ids_ME, weight_VD.shape[0] - 1).amin(dim=1)
    return ids_M, best_M1.squeeze(1)
