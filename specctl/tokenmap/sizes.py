"""Sizes and weights as people write them: `32k` is 32 * 1024 ids, `code=2` counts code twice.

*Source:* FR-Spec names its files by the number (`freq_32768.pt`) and calls that size 32k. Heads of
32,000 ids exist as well (SpecForge's default); they are written as `32000`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from math import lcm

_SIZE = re.compile(r"(\d{1,9})([kK]?)")
_KIBI = 1024
MAX_SIZE = 1 << 31
_MAX_WEIGHT = 10**6
_MAX_DIGITS = 6


class SizeTextError(ValueError):
    """A text that is no size or weight; its message says why."""


def parse_sizes(texts: Iterable[str]) -> tuple[int, ...]:
    """Return sizes ascending, each once.

    Args:
        texts: each one size or several with commas: `16k,32k`, `32000`.

    Raises:
        SizeTextError: a part is no size.
    """
    sizes: set[int] = set()
    for text in texts:
        for part in text.split(","):
            match = _SIZE.fullmatch(part.strip())
            if match is None:
                raise SizeTextError(
                    f"`{part}` is not a number of ids such as 32768, or 32k for 32 * 1024"
                )
            size = int(match[1]) * (_KIBI if match[2] else 1)
            if not 0 < size < MAX_SIZE:
                raise SizeTextError(f"`{part}` is not a size between 1 and {MAX_SIZE - 1}")
            sizes.add(size)
    return tuple(sorted(sizes))


def parse_weights(texts: Iterable[str]) -> dict[str, Decimal]:
    """Return domain -> weight of `code=2` texts; a domain that is not named has weight 1.

    Raises:
        SizeTextError: a text is no pair, or its number is no weight.
    """
    weights: dict[str, Decimal] = {}
    for text in texts:
        for part in text.split(","):
            name, mark, number = part.strip().rpartition("=")
            if not mark or not name:
                raise SizeTextError(f"`{part}` is not DOMAIN=NUMBER such as code=2")
            if name in weights:
                raise SizeTextError(f"`{name}` has two weights")
            weights[name] = _weight(number, part)
    return weights


def _weight(number: str, part: str) -> Decimal:
    try:
        weight = Decimal(number)
    except InvalidOperation:
        raise SizeTextError(f"`{number}` in `{part}` is not a number") from None
    if not weight.is_finite() or not 0 <= weight <= _MAX_WEIGHT:
        raise SizeTextError(f"`{part}`: a weight is a number from 0 to {_MAX_WEIGHT}")
    if round(weight, _MAX_DIGITS) != weight:
        raise SizeTextError(f"`{part}`: a weight has at most {_MAX_DIGITS} digits after the point")
    return weight


def integer_weights(names: Iterable[str], weights: Mapping[str, Decimal]) -> tuple[int, ...]:
    """Return one integer for each name, in the ratios of the weights: ranks stay exact.

    Args:
        names: domains in the order of their counts.
        weights: by domain; 1 where there is none.
    """
    ratios = [weights.get(name, Decimal(1)).as_integer_ratio() for name in names]
    scale = lcm(*(denominator for _, denominator in ratios)) if ratios else 1
    return tuple(numerator * (scale // denominator) for numerator, denominator in ratios)
