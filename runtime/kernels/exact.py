"""Exponential and logarithm in separately rounded IEEE operations: the same bits on every device.

A library's functions are vectorised with another tail and differ between devices; these are a few
units in the last place off and depend on the argument alone. float64 throughout.
*Source:* argument reduction and its split of ln 2 as in FreeBSD's msun (e_exp.c).
"""

from __future__ import annotations

import math

import torch

SQRT_HALF = math.sqrt(0.5)
LN2 = math.log(2.0)
INVERSE_LN2 = 1.0 / LN2
# k * LN2_HIGH is exact for |k| < 2**20.
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# atanh(s) = s + s^3/3 + ...; |s| <= 0.1716 after reduction: what is left out is below 3e-17 of it.
ATANH_TERMS = tuple(1.0 / odd for odd in range(19, 0, -2))
# exp(r) = 1 + r + r^2/2 + ...; |r| <= 0.3466 after reduction: what is left out is below 5e-18.
EXP_TERMS = tuple(1.0 / math.factorial(power) for power in range(13, -1, -1))
LOWEST_EXPONENT = -700.0
"""Arguments below yield 0: their exponential is near the least normal number."""


def exact_log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive float64.

    Exactness: elementwise.
    Graph-safe: yes.
    """
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < SQRT_HALF
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    exponent = exponent.to(torch.float64) - is_low.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, ATANH_TERMS[0])
    for term in ATANH_TERMS[1:]:
        series = series * square
        series = series + term
    return exponent * LN2 + (series * s) * 2.0


def exact_exp(x: torch.Tensor) -> torch.Tensor:
    """Return the exponential of float64 that is 0 or less; 0 below `LOWEST_EXPONENT`.

    Exactness: elementwise.
    Graph-safe: yes.
    """
    reduced = x.clamp(min=LOWEST_EXPONENT)
    power = (reduced * INVERSE_LN2).round()
    rest = (reduced - power * LN2_HIGH) - power * LN2_LOW
    series = torch.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = series * rest
        series = series + term
    scale = ((power.to(torch.int64) + 1023) << 52).view(torch.float64)
    return torch.where(x < LOWEST_EXPONENT, 0.0, series * scale)
