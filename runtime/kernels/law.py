"""From logits to the law of a token, row by row: temperature, then top-k, min-p and top-p.

Filters rank ids by (value descending, id ascending), so ties at a border are always cut alike.

Invariants: elementwise operations round once each, sums whose order a device may choose are integer
sums, and sorting and maxima are exact. So a row's result never depends on the batch.

Legend: M rows, V ids of one vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runtime.kernels.exact import exact_exp

MASKED = -math.inf
FIXED_POINT = 2.0**40
"""Scale of a mass: 40 bits for a weight in [0, 1] leave 23 bits for the vocabulary."""
KEEPS_ALL = 2**31 - 1
"""A `top_k` beyond every vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FilterRows:
    """Filters of M rows on the device, each with a value that keeps every id.

    Args:
        top_k_M: int64; V or more keeps all.
        log_min_p_M: fp32; -inf keeps all.
        top_p_M: fp64; 1 keeps all.
    """

    top_k_M: torch.Tensor
    log_min_p_M: torch.Tensor
    top_p_M: torch.Tensor


def comparable(values_V: torch.Tensor) -> torch.Tensor:
    """Return values of which one is the highest: NaN is -inf and +inf the highest finite number.

    NaN is never chosen, as in the head's own argmax. Options beyond float32's range make infinities
    here, and NaN where two of them meet.
    """
    return torch.nan_to_num(values_V, nan=MASKED, neginf=MASKED)


def scale_rows(values_MV: torch.Tensor, temperature_M: torch.Tensor) -> torch.Tensor:
    """Return (values - max) / temperature: 0 at the maximum, less elsewhere, never NaN.

    Args:
        values_MV: fp32.
        temperature_M: fp32; it and its reciprocal are normal numbers.

    Exactness: a row depends on itself alone.
    Graph-safe: yes.
    """
    values_MV = comparable(values_MV)
    lowest = torch.finfo(torch.float32).min
    highest_M1 = values_MV.amax(dim=1, keepdim=True).clamp(min=lowest)
    return (values_MV - highest_M1) / temperature_M[:, None]


def filter_rows(scaled_MV: torch.Tensor, rows: FilterRows) -> torch.Tensor:
    """Return the log weights with ids that top-k, min-p and top-p drop set to -inf.

    Args:
        scaled_MV: fp32 log weights of which the highest is 0.
        rows: what to keep; the most likely id always is.

    Exactness: a row depends on itself alone; sums whose order a device may choose are integer sums.
    Graph-safe: yes.
    """
    ordered_MV, order_MV = torch.sort(scaled_MV, dim=1, descending=True, stable=True)
    rank_V = torch.arange(ordered_MV.shape[1], device=ordered_MV.device)
    keep_MV = rank_V < rows.top_k_M[:, None]
    keep_MV &= ordered_MV >= rows.log_min_p_M[:, None]
    mass_MV = masses(ordered_MV) * keep_MV
    before_MV = (mass_MV.cumsum(dim=1) - mass_MV).to(torch.float64)
    share_M1 = mass_MV.sum(dim=1, keepdim=True).to(torch.float64) * rows.top_p_M[:, None]
    keep_MV &= (before_MV < share_M1) | (rows.top_p_M[:, None] >= 1.0)
    keep_MV |= rank_V == 0
    kept_MV = torch.where(keep_MV, ordered_MV, MASKED)
    return torch.empty_like(scaled_MV).scatter_(1, order_MV, kept_MV)


def masses(scaled_MV: torch.Tensor) -> torch.Tensor:
    """Return exp(log weight) in fixed point, int64: 2**40 at the highest, whose log weight is 0.

    Integers: a float sum may be added in another order from one call to the next.

    Exactness: elementwise.
    """
    return (exact_exp(scaled_MV.to(torch.float64)) * FIXED_POINT).round().to(torch.int64)
