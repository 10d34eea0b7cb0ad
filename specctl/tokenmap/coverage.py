"""How much of held-out text a map covers, and which size to recommend.

Rule for the size: the smallest multiple of `SIZE_STEP` whose held-out coverage is at most
`max_loss` below that of all ids seen in the counted text (a larger map would only add unseen ids).
Assumption, printed with the result: served text has the token distribution of the held-out text.
Why that measure: at a position where the target's token is outside the map the draft cannot be
right, so coverage bounds acceptance at each position; a loss of 0.005 costs at most 0.5 % of the
acceptance rate there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from specctl.tokenmap.selection import Ranking

SIZE_STEP = 128
MAX_LOSS = 0.005
ASSUMPTION = "served text has the token distribution of the held-out text"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoveragePoint:
    """One size on the curve.

    Args:
        size: ids in the map, forced ones included.
        coverage: share of held-out token occurrences inside the map, 0..1.
    """

    size: int
    coverage: float


def cumulative_hits(ranking: Ranking, held_out: array[int]) -> array[int]:
    """Return [tokenizer_size + 1] held-out occurrences inside the first k ids of the ranking."""
    hits = array("Q", [0])
    total = 0
    for target_id in ranking.ids_target:
        total += held_out[target_id]
        hits.append(total)
    return hits


def coverage_at(hits: array[int], size: int) -> float:
    """Return the share of held-out occurrences inside the map of `size` ids."""
    return hits[size] / hits[-1] if hits[-1] else 1.0


def curve_sizes(ranking: Ranking) -> tuple[int, ...]:
    """Return the sizes of the curve: powers of two and their middles, and the whole tokenizer."""
    num_ids = len(ranking.ids_target)
    lowest = max(1, ranking.num_forced)
    sizes = {num_ids}
    step = SIZE_STEP
    while step < num_ids:
        sizes |= {step, step + step // 2}
        step *= 2
    return tuple(sorted(size for size in sizes if lowest <= size <= num_ids))


def coverage_curve(
    ranking: Ranking, hits: array[int], extra: Sequence[int] = ()
) -> tuple[CoveragePoint, ...]:
    """Return coverage at `curve_sizes` and at `extra` sizes, ascending."""
    sizes = sorted({*curve_sizes(ranking), *extra})
    return tuple(CoveragePoint(size=size, coverage=coverage_at(hits, size)) for size in sizes)


def recommended_size(ranking: Ranking, hits: array[int], max_loss: float = MAX_LOSS) -> int:
    """Return the size that the rule of this module chooses.

    The last multiple of `SIZE_STEP` may exceed the tokenizer; then it is the tokenizer's size.
    """
    num_ids = len(ranking.ids_target)
    allowed = coverage_at(hits, ranking.num_seen) - max_loss
    size = -(-max(1, ranking.num_forced) // SIZE_STEP) * SIZE_STEP
    while size < num_ids and coverage_at(hits, size) < allowed:
        size += SIZE_STEP
    return min(size, num_ids)
