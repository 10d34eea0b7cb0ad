"""The greedy choice among head rows that each input row names for itself, alone or beside a head.

Every logit has the bits that `head_logits` gives it, so a choice here may be compared with those
over other rows of the same weight.

Legend: M rows, D width, V head rows, R rows of another head, S slots, E named rows of each slot,
C rows named besides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.head import (
    HeadRows,
    head_argmax_twin,
    head_logits_twin,
    plain_rows,
    some_rows,
)
from runtime.kernels.norm import RowNorm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NamedRows:
    """Which rows of a head each input row names.

    Args:
        weight_VD: [V, D], dtype of the input rows.
        ids_SE: int64 in the head's vocabulary, contiguous; negative entries name nothing.
        slots_M: int64, the row of `ids_SE` that holds for an input row; None: its own.
        more_ids_MC: int64, as `ids_SE`, named besides; None: nothing.
    """

    weight_VD: torch.Tensor
    ids_SE: torch.Tensor
    slots_M: torch.Tensor | None = None
    more_ids_MC: torch.Tensor | None = None

    @property
    def num_named(self) -> int:
        """Rows that each input row names, E + C."""
        more = self.more_ids_MC
        return self.ids_SE.shape[1] + (0 if more is None else more.shape[1])

    def ids(self) -> torch.Tensor:
        """Return int64 [M, E + C]."""
        slots_M, more = self.slots_M, self.more_ids_MC
        ids_ME = self.ids_SE if slots_M is None else self.ids_SE.index_select(0, slots_M)
        return ids_ME if more is None else torch.cat((ids_ME, more), dim=1)


def head_rows_argmax(
    x_MD: HeadRows, named: NamedRows, norm: RowNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the highest logit among the named rows, the lowest id among equals.

    Args:
        x_MD: as in `head_logits`.
        named: rows of the head.
        norm: as in `head_logits`.

    Returns:
        (ids int64 [M], logit float32 [M]); where nothing is named or every logit is NaN, the logit
        is minus infinity and the id means nothing.

    Exactness: the logit has the bits of `head_logits`.
    Graph-safe: yes (CUDA).
    """
    if plain_rows(x_MD).is_cuda:
        from runtime.kernels.cuda.head_rows import launch_head_rows_argmax

        return launch_head_rows_argmax(x_MD, named, norm)
    return head_rows_argmax_twin(x_MD, named, norm)


def joint_head_argmax(
    x_MD: HeadRows,
    weight_RD: torch.Tensor,
    named: NamedRows,
    norm: RowNorm | None = None,
    *,
    names_R: torch.Tensor,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the highest logit among the rows of a head and the named ones of a larger one.

    Equal logits are compared by the ids of the larger head, and the lowest is taken.

    Args:
        x_MD: as in `head_logits`.
        weight_RD: [R, D], dtype of `x_MD`.
        named: rows of the larger head.
        norm: as in `head_logits`, of both heads.
        names_R: int64, ids of the rows of `weight_RD` in the larger head.
        copy_M: as in `head_argmax`.

    Returns:
        (ids int64 [M] in the larger head, contiguous; logit float32 [M]); where every logit is NaN
        or minus infinity, the choice of `head_argmax` over `weight_RD`.

    Exactness: the logit has the bits of `head_logits`.
    Graph-safe: yes (CUDA).
    """
    if plain_rows(x_MD).is_cuda:
        from runtime.kernels.cuda.head_rows import launch_joint_head_argmax as choose
    else:
        choose = joint_head_argmax_twin
    return choose(x_MD, weight_RD, named, norm, names_R=names_R, copy_M=copy_M)


def head_rows_argmax_twin(
    x_MD: HeadRows, named: NamedRows, norm: RowNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `head_rows_argmax` with torch, one input row at a time."""
    ids_ME, weight_VD, num_rows = named.ids(), named.weight_VD, plain_rows(x_MD).shape[0]
    if ids_ME.numel() == 0:
        return ids_ME.new_zeros(num_rows), weight_VD.new_full(
            (num_rows,), float("-inf"), dtype=torch.float32
        )
    logits_ME = torch.cat(
        [
            head_logits_twin(
                some_rows(x_MD, slice(m, m + 1)), weight_VD[ids_ME[m].clamp(min=0)], norm
            )
            for m in range(num_rows)
        ]
    )
    is_candidate_ME = (ids_ME >= 0) & ~logits_ME.isnan()
    logits_ME = torch.where(is_candidate_ME, logits_ME, float("-inf"))
    best_M1 = logits_ME.amax(dim=1, keepdim=True)
    is_best_ME = is_candidate_ME & (logits_ME == best_M1)
    ids_M = torch.where(is_best_ME, ids_ME, weight_VD.shape[0] - 1).amin(dim=1)
    return ids_M, best_M1.squeeze(1)


def joint_head_argmax_twin(
    x_MD: HeadRows,
    weight_RD: torch.Tensor,
    named: NamedRows,
    norm: RowNorm | None = None,
    *,
    names_R: torch.Tensor,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `joint_head_argmax` with torch: one choice, the other, and the better of both."""
    ids_M, logits_M = head_argmax_twin(x_MD, weight_RD, norm)
    ids_M = names_R[ids_M]
    others_M, other_logits_M = head_rows_argmax_twin(x_MD, named, norm)
    is_better_M = (other_logits_M > logits_M) | ((other_logits_M == logits_M) & (others_M < ids_M))
    is_better_M &= other_logits_M > float("-inf")
    ids_M = torch.where(is_better_M, others_M, ids_M)
    if copy_M is not None:
        copy_M.copy_(ids_M)
    return ids_M, torch.where(is_better_M, other_logits_M, logits_M)
