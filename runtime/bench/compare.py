"""Are the answers of runs equal? Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.bench.raw import RequestRecord
from runtime.bench.report import Divergence, Identical


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first position at which two sequences differ, None when they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_runs(
    base: Sequence[RequestRecord], others: Sequence[Sequence[RequestRecord]]
) -> Identical:
    """Compare every other run with one run, request by request, in the same order."""
    equal = 0
    first: Divergence | None = None
    for index, request in enumerate(base):
        found = _divergence(request, [run[index] for run in others])
        equal += found is None
        first = first or found
    return Identical(equal=equal, total=len(base), first_divergence=first)


def id_at(ids: Sequence[int], position: int) -> int | None:
    """Return the id at a position; None where the answer has ended."""
    return ids[position] if position < len(ids) else None


def _divergence(base: RequestRecord, others: Sequence[RequestRecord]) -> Divergence | None:
    for other in others:
        position = first_difference(base.ids, other.ids)
        if position is not None:
            return Divergence(
                prompt=base.prompt,
                turn=base.turn,
                position=position,
                target_only_id=id_at(base.ids, position),
                speculative_id=id_at(other.ids, position),
            )
    return None
