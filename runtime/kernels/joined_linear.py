"""Product of two rows side by side, each with a norm of its own or none.

What joins a token and a state in a draft: two norms, a concatenation and a product are one kernel,
and the rows of an embedding table are looked up inside it.

Rounding points: rows times a norm's weight are rounded once; each half's sums are finished in
float32 and multiplied by the row's scale; halves and bias are added and rounded once.

Legend: M rows, D width of a half, N output features, X rows to take from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.linear import linear_twin
from runtime.kernels.norm import RowNorm, weigh_rows_twin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowHalf:
    """One of two rows side by side.

    Args:
        rows_XD: rows to take from.
        ids_M: int64, which of them; None: all, in order.
        norm: before the product, or None.
    """

    rows_XD: torch.Tensor
    ids_M: torch.Tensor | None = None
    norm: RowNorm | None = None

    @property
    def num_rows(self) -> int:
        """Rows that are taken."""
        return self.rows_XD.shape[0] if self.ids_M is None else self.ids_M.shape[0]


def joined_linear(
    first: RowHalf,
    second: RowHalf,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm two rows, put them side by side and multiply them by a weight.

    Args:
        first: rows that the weight's first D columns read.
        second: rows that the other D columns read.
        weight_NK: [N, 2 D], dtype of the rows.
        bias_N: [N] or None.

    Returns:
        [M, N], dtype of the rows.

    Exactness: bits of a row are a function of its two halves and the weights alone.
    Graph-safe: yes (CUDA).
    """
    if first.rows_XD.is_cuda:
        from runtime.kernels.cuda.joined_linear import launch_joined_linear

        return launch_joined_linear(first, second, weight_NK, bias_N)
    return joined_linear_twin(first, second, weight_NK, bias_N)


def joined_linear_twin(
    first: RowHalf,
    second: RowHalf,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `joined_linear` with torch."""
    width = first.rows_XD.shape[1]
    sums_MN = _half_product(first, weight_NK[:, :width])
    sums_MN = sums_MN + _half_product(second, weight_NK[:, width:])
    if bias_N is not None:
        sums_MN = sums_MN + bias_N.float()
    return sums_MN.to(first.rows_XD.dtype)


def _half_product(half: RowHalf, weight_ND: torch.Tensor) -> torch.Tensor:
    """Return float32 [M, N]."""
    rows_MD = half.rows_XD
    if half.ids_M is not None:
        rows_MD = torch.index_select(rows_MD, 0, half.ids_M)
    if half.norm is None:
        return linear_twin(rows_MD, weight_ND, out_dtype=torch.float32)
    weighted_MD, scale_M1 = weigh_rows_twin(rows_MD, half.norm)
    return linear_twin(weighted_MD, weight_ND, out_dtype=torch.float32) * scale_M1
