"""Choose the ids of a map: forced ones first, then by frequency.

Invariants: the result is ascending, without duplicates, inside the tokenizer, and contains every
forced id; ties in frequency go to the lowest id, so the result depends on the counts only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from specctl.contract.diagnostics import DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """All ids of a tokenizer in the order in which a map takes them.

    Args:
        ids_target: forced ids ascending, then the others by falling count, ties to the lowest.
        num_forced: how many of them are forced.
        num_seen: leading ids that are forced or occur at least once.
    """

    ids_target: tuple[int, ...]
    num_forced: int
    num_seen: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The ids of a map.

    Args:
        ids_target: [size] ascending.
        displaced: ids that frequency alone would have chosen and forced ids took the place of,
            ascending.
        num_unseen: chosen ids that are not forced and never occur.
    """

    ids_target: tuple[int, ...]
    displaced: tuple[int, ...]
    num_unseen: int


def rank(per_id: array[int], forced: Iterable[int]) -> Ranking:
    """Rank every id of the tokenizer.

    Args:
        per_id: [tokenizer_size] occurrences.
        forced: ids that come first.
    """
    first = sorted(set(forced))
    is_forced = bytearray(len(per_id))
    for target_id in first:
        is_forced[target_id] = 1
    others = [target_id for target_id in range(len(per_id)) if not is_forced[target_id]]
    others.sort(key=per_id.__getitem__, reverse=True)  # stable: equal counts stay ascending
    num_seen = len(first) + sum(1 for target_id in others if per_id[target_id])
    return Ranking(ids_target=(*first, *others), num_forced=len(first), num_seen=num_seen)


def select(ranking: Ranking, per_id: array[int], size: int) -> Selection:
    """Return the map of `size` ids.

    Raises:
        DiagnosticError: SD421 when the forced ids do not fit or the tokenizer has fewer ids.
    """
    num_ids = len(ranking.ids_target)
    if not max(1, ranking.num_forced) <= size <= num_ids:
        if size > num_ids:
            message = f"a map of {size} ids does not fit a tokenizer of {num_ids} ids"
        else:
            message = f"a map of {size} ids cannot hold {ranking.num_forced} forced ids"
        raise DiagnosticError(
            diagnose(
                "SD421",
                where=f"--size {size}",
                message=message if size > 0 else f"a map of {size} ids holds nothing",
                expected=f"{max(1, ranking.num_forced)} to {num_ids}",
                found=size,
            )
        )
    chosen = ranking.ids_target[:size]
    by_frequency = rank(per_id, ()).ids_target[:size]
    displaced = sorted(set(by_frequency) - set(chosen))
    return Selection(
        ids_target=tuple(sorted(chosen)),
        displaced=tuple(displaced),
        num_unseen=max(0, size - ranking.num_seen),
    )
