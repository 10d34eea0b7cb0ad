"""The one place where a layer needs the other ranks: a product whose input features are split.

qkv and gate/up keep whole rows of a weight on a rank, so their outputs are this rank's heads and
features; o_proj and down_proj keep columns, and their products are partials of one sum.

Legend: M rows, K input features of this rank, D stream width.
"""

from __future__ import annotations

import torch

from runtime.kernels import Stream, enter_stream, linear, residual_linear
from runtime.parallel.ranks import Ranks, rank_sum

SPLIT_ROWS = frozenset(
    f"{name}.{kind}"
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for kind in ("weight", "bias")
)
"""Roles within a layer whose first dimension is split over ranks; biases go with their rows."""

SPLIT_COLUMNS = frozenset(("o_proj.weight", "down_proj.weight"))
"""Roles within a layer whose second dimension is split; their biases are whole, added once."""


def add_to_stream(
    ranks: Ranks,
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None,
    *,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
    out_MD: torch.Tensor | None = None,
) -> Stream:
    """Multiply rows by a weight whose columns are split and add the product to the stream.

    Args:
        ranks: who holds the other columns.
        x_MK: this rank's features.
        weight_DK: this rank's columns.
        bias_D: whole, or None.
        residual_MD: the stream, the same on every rank.
        norm_D: [D], weight of the norm that comes next.
        out_MD: takes the new stream's own rows, of one rank; None: they lie anywhere.

    Exactness: float32 partials are added in rank order, then bias and stream, and rounded once. One
    rank has the bits of `residual_linear`; another number of ranks may have others.
    """
    if ranks.size == 1:
        return residual_linear(
            x_MK, weight_DK, bias_D, residual_MD=residual_MD, norm_D=norm_D, out_MD=out_MD
        )
    assert out_MD is None, "several ranks write the stream where they sum it"
    total_MD = rank_sum(ranks, linear(x_MK, weight_DK, out_dtype=torch.float32))
    if bias_D is not None:
        total_MD = total_MD + bias_D.float()
    return enter_stream((total_MD + residual_MD.float()).to(residual_MD.dtype), norm_D)


def rank_linear(
    ranks: Ranks, x_MK: torch.Tensor, weight_DK: torch.Tensor, bias_D: torch.Tensor | None
) -> torch.Tensor:
    """Return [M, D] in the dtype of `x_MK`: the product of `add_to_stream` without a stream.

    Exactness: as `add_to_stream`, rounded once after the bias.
    """
    if ranks.size == 1:
        return linear(x_MK, weight_DK, bias_D)
    total_MD = rank_sum(ranks, linear(x_MK, weight_DK, out_dtype=torch.float32))
    if bias_D is not None:
        total_MD = total_MD + bias_D.float()
    return total_MD.to(x_MK.dtype)
