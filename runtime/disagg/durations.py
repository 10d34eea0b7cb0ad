"""A histogram of seconds, for metrics: fixed bounds, no memory of single values."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Durations:
    """How many durations fell below each bound; the last count is of those beyond all bounds."""

    def __init__(self) -> None:
        """Have seen none."""
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, how many were at most that long), as Prometheus wants them."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found
