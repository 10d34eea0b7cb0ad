"""How much of some text a map covers, for a curve of sizes and for each slice of the text.

At a position where the target's token is outside the map the draft cannot be right, so coverage
bounds acceptance at each position. A slice is a domain, a language or the target's own outputs.
`smallest_within` is the rule of `--max-loss`: the smallest allowed size whose coverage is at most
so much below that of all ids seen in the counted text (a larger map would add unseen ids only).
Assumption, printed with the result: served text has the token distribution of the measured text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

from specctl.tokenmap.selection import Ranking

SIZE_STEP = 128
ASSUMPTION = "served text has the token distribution of the measured text"
SliceKind = Literal["all", "domain", "language", "outputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoveragePoint:
    """One size on the curve.

    Args:
        size: ids in the map, forced ones included.
        coverage: share of token occurrences inside the map, 0..1.
    """

    size: int
    coverage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Tokens that coverage is measured on.

    Args:
        kind: what it is a part of; `all` is the whole held-out text.
        name: of the domain, language or file.
        per_id: [tokenizer_size] occurrences, times the weight of their domain.
        total: sum of them, those of ids outside the tokenizer included.
        num_tokens: occurrences without weights.
    """

    kind: SliceKind
    name: str
    per_id: Sequence[int]
    total: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceCoverage:
    """The curve of one slice."""

    kind: SliceKind
    name: str
    num_tokens: int
    curve: tuple[CoveragePoint, ...]

    def at(self, size: int) -> float:
        """Return the coverage at a size of the curve."""
        return next(point.coverage for point in self.curve if point.size == size)


def cumulative_hits(ranking: Ranking, per_id: Sequence[int]) -> array[int]:
    """Return [ids + 1] occurrences inside the first k ids of the ranking."""
    hits = array("Q", [0])
    total = 0
    for target_id in ranking.ids_target:
        total += per_id[target_id]
        hits.append(total)
    return hits


def coverage_at(hits: array[int], size: int, total: int | None = None) -> float:
    """Return the share of occurrences inside the map of `size` ids.

    Args:
        hits: of `cumulative_hits`.
        size: ids in the map.
        total: all occurrences; None: those of the ranking's ids.
    """
    total = hits[-1] if total is None else total
    return hits[size] / total if total else 1.0


def size_step(divisible_by: int) -> int:
    """Return the step of sizes that are recommended: whole tiles for each rank."""
    return lcm(SIZE_STEP, divisible_by)


def allowed_sizes(ranking: Ranking, divisible_by: int = 1) -> tuple[int, ...]:
    """Return the sizes that may be recommended, ascending, at least one.

    Multiples of `size_step`, and the largest multiple of `divisible_by` that the tokenizer has.
    """
    num_ids = len(ranking.ids_target)
    step = size_step(divisible_by)
    lowest = max(1, ranking.num_forced)
    top = num_ids - num_ids % divisible_by
    sizes = set(range(-(-lowest // step) * step, top + 1, step))
    return tuple(sorted(sizes | ({top} if top >= lowest else {num_ids})))


def curve_sizes(ranking: Ranking) -> tuple[int, ...]:
    """Return the sizes of the curve: powers of two, three in between, and all ids."""
    num_ids = len(ranking.ids_target)
    lowest = max(1, ranking.num_forced)
    sizes = {num_ids}
    step = SIZE_STEP
    while step < num_ids:
        sizes |= {step + step * quarter // 4 for quarter in range(4)}
        step *= 2
    return tuple(sorted(size for size in sizes if lowest <= size <= num_ids))


def slice_coverage(ranking: Ranking, part: Slice, sizes: Iterable[int]) -> SliceCoverage:
    """Return the coverage of one slice at `sizes`, ascending."""
    hits = cumulative_hits(ranking, part.per_id)
    return SliceCoverage(
        kind=part.kind,
        name=part.name,
        num_tokens=part.num_tokens,
        curve=tuple(
            CoveragePoint(size=size, coverage=coverage_at(hits, size, part.total))
            for size in sorted(set(sizes))
        ),
    )


def smallest_within(
    ranking: Ranking, hits: array[int], max_loss: float, sizes: Sequence[int]
) -> int:
    """Return the smallest of `sizes` that loses at most `max_loss` against all ids seen."""
    allowed = coverage_at(hits, ranking.num_seen) - max_loss
    return next((size for size in sizes if coverage_at(hits, size) >= allowed), sizes[-1])
