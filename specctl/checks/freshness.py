"""Tell a matrix that was only initialised from a trained one, by its spread.

A fresh matrix has independent elements of one law: one spread, the law's kurtosis, and rows and
columns whose spreads differ only by chance. Training gives rows of different length, and moves the
spread. A matrix must pass all of these tests to be called fresh.
*Source:* transformers `_init_weights` (normal with `initializer_range`), torch `nn.Linear` (uniform
within 1 / sqrt(in)) and `nn.Embedding` (standard normal).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import mul

from specctl.checkpoint import TensorEntry
from specctl.checkpoint.config_sections import model_sections
from specctl.checks.scan import floats

MIN_ROWS = 16
MIN_COLUMNS = 32
MIN_ELEMENTS = 4096
LIBRARY_RANGE = 0.02  # `initializer_range` of every transformers decoder config by default
_SIGMAS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """A way in which libraries fill new weights.

    Args:
        name: for messages.
        spread: standard deviation.
        kurtosis: fourth moment over squared variance.
    """

    name: str
    spread: float
    kurtosis: float


def fresh_law(
    entry: TensorEntry, sample: Sequence[bytes], config: Mapping[str, object]
) -> Law | None:
    """Return the law that the sampled rows follow, None for a trained or undecidable matrix.

    Args:
        entry: the matrix [out, in].
        sample: stored bytes of some rows, as many columns of each.
        config: config.json's object, for `initializer_range`.
    """
    rows = [floats(entry.dtype, data) for data in sample]
    if len(rows) < MIN_ROWS or any(row is None for row in rows):
        return None
    values = [row for row in rows if row is not None]
    columns = len(values[0])
    if columns < MIN_COLUMNS or columns * len(values) < MIN_ELEMENTS:
        return None
    squares = [sum(map(mul, row, row)) / columns for row in values]
    variance = sum(squares) / len(squares)
    laws = [
        law
        for law in _laws(entry.shape[-1], config)
        if abs(math.sqrt(variance) / law.spread - 1.0) < 0.05
    ]
    return next((law for law in laws if _follows(values, squares, variance, law)), None)


def _laws(fan_in: int, config: Mapping[str, object]) -> tuple[Law, ...]:
    stated = [section.get("initializer_range") for _, section in model_sections(config)]
    spreads = [s for s in stated if isinstance(s, float) and 0.0 < s < 10.0]
    first = spreads[0] if spreads else LIBRARY_RANGE
    return (
        Law(name=f"a normal initialisation by {first:g}", spread=first, kurtosis=3.0),
        Law(
            name="torch's initial Linear weights",
            spread=1.0 / math.sqrt(3.0 * fan_in),
            kurtosis=1.8,
        ),
        Law(name="torch's initial Embedding weights", spread=1.0, kurtosis=3.0),
    )


def _follows(
    values: Sequence[array[float]], squares: Sequence[float], variance: float, law: Law
) -> bool:
    rows, columns = len(values), len(values[0])
    count = rows * columns
    excess = law.kurtosis - 1.0
    if abs(math.sqrt(variance) / law.spread - 1.0) > _SIGMAS * math.sqrt(excess / 4 / count) + 2e-3:
        return False
    mean = sum(map(sum, values)) / count
    if abs(mean) > _SIGMAS * math.sqrt(variance / count):
        return False
    fourth = sum(square * square for row in values for square in map(mul, row, row)) / count
    tolerance = _SIGMAS * math.sqrt(24.0 / count) + 0.02
    if abs(fourth / variance**2 - law.kurtosis) > tolerance:
        return False
    flat = array("d", chain.from_iterable(values))
    by_column = [sum(map(mul, part, part)) / rows for part in _columns(flat, columns)]
    return _is_even(squares, variance, excess / columns) and _is_even(
        by_column, variance, excess / rows
    )


def _columns(flat: array[float], columns: int) -> list[array[float]]:
    return [flat[place::columns] for place in range(columns)]


def _is_even(means: Sequence[float], variance: float, expected: float) -> bool:
    """Tell whether mean squares differ by chance only; `expected` is their relative variance."""
    seen = sum((mean / variance - 1.0) ** 2 for mean in means) / len(means)
    return seen < expected * (1.0 + _SIGMAS * math.sqrt(2.0 / len(means)))
