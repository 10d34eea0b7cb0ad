"""In which order tests go to the workers of `pytest -n N --dist worksteal`.

Each worker is given neighbours of the collection, as many as the others, and takes the end of
somebody's share when it has none left. Tests that are marked `long` therefore stand at the
beginnings of the shares: one of them that began last would keep everybody waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def long_first(items: Sequence[_T], is_long: Callable[[_T], bool], num_workers: int) -> list[_T]:
    """Return items in an order in which each share has its long ones first, evenly shared out.

    Args:
        items: long ones should begin in this order.
        is_long: tells them.
        num_workers: one or more.
    """
    sizes: list[int] = []
    for number in range(num_workers):  # as the scheduler divides
        sizes.append((len(items) - sum(sizes)) // (num_workers - number))
    shares: list[list[_T]] = [[] for _ in sizes]
    queue = iter(sorted(items, key=lambda item: not is_long(item)))
    for place in range(max(sizes, default=0)):
        row = [share for share, size in zip(shares, sizes, strict=True) if place < size]
        for share in row if place % 2 == 0 else reversed(row):  # the longest has no long one behind
            share.append(next(queue))
    return [item for share in shares for item in share]
