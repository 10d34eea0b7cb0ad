"""The exponential and masses on CUDA, with the bits of `runtime.kernels.exact` and `kernels.law`.

A product and a sum must not become one operation here: kernels are launched without such fusion.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-700.0)
_INVERSE_LN2 = tl.constexpr(1.0 / 0.6931471805599453)
_LN2_HIGH = tl.constexpr(6.93147180369123816490e-01)
_LN2_LOW = tl.constexpr(1.90821492927058770002e-10)
_ROUNDS = tl.constexpr(1.5 * 2.0**52)  # added and taken away: rounds to the nearest even integer
_FIXED_POINT = tl.constexpr(2.0**40)


@triton.jit
def exact_exp(x):
    """`runtime.kernels.exact.exact_exp` of float64."""
    reduced = tl.maximum(x, _LOWEST)
    power = (reduced * _INVERSE_LN2 + _ROUNDS) - _ROUNDS
    rest = (reduced - power * _LN2_HIGH) - power * _LN2_LOW
    series = tl.full(rest.shape, 1.0 / 6227020800.0, dtype=tl.float64)
    series = series * rest + 1.0 / 479001600.0
    series = series * rest + 1.0 / 39916800.0
    series = series * rest + 1.0 / 3628800.0
    series = series * rest + 1.0 / 362880.0
    series = series * rest + 1.0 / 40320.0
    series = series * rest + 1.0 / 5040.0
    series = series * rest + 1.0 / 720.0
    series = series * rest + 1.0 / 120.0
    series = series * rest + 1.0 / 24.0
    series = series * rest + 1.0 / 6.0
    series = series * rest + 0.5
    series = series * rest + 1.0
    series = series * rest + 1.0
    scale = ((power.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < _LOWEST, 0.0, series * scale)


@triton.jit
def mass_of(scaled):
    """`runtime.kernels.law.masses` of float32 log weights, int64."""
    weight = exact_exp(scaled.to(tl.float64)) * _FIXED_POINT
    return ((weight + _ROUNDS) - _ROUNDS).to(tl.int64)
