"""Choose the ids of a map: forced ones first, then by weighted frequency.

Invariants: the result is ascending, without duplicates, holds every forced id and only ids that
have a token: neither rows that pad the embedding nor gaps of the tokenizer. Ties in frequency go to
the lowest id, so the result depends on the counts only. Ids that never occur come last, the lowest
first: in a BPE tokenizer those are the earliest merges.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """All ids that a map may hold, in the order in which a map takes them.

    Args:
        ids_target: forced ids ascending, then the others by falling count, ties to the lowest.
        by_frequency: the same ids without regard to forced ones.
        num_forced: how many of them are forced.
        num_seen: leading ids that are forced or occur at least once.
    """

    ids_target: tuple[int, ...]
    by_frequency: tuple[int, ...]
    num_forced: int
    num_seen: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The ids of a map.

    Args:
        ids_target: [size] ascending.
        ids_by_rank: [size] the same ids by falling frequency, the order of FR-Spec's files.
        displaced: ids that frequency alone would have chosen and forced ids took the place of,
            ascending.
        num_unseen: chosen ids that are not forced and never occur.
    """

    ids_target: tuple[int, ...]
    ids_by_rank: tuple[int, ...]
    displaced: tuple[int, ...]
    num_unseen: int


def weighted_counts(
    per_domain: Sequence[array[int]], weights: Sequence[int], tokenizer_size: int
) -> list[int]:
    """Return [tokenizer_size] the sums of weight times occurrences.

    Args:
        per_domain: one [tokenizer_size] array for each domain.
        weights: integers, one for each domain.
        tokenizer_size: length of the result.
    """
    total = [0] * tokenizer_size
    for per_id, weight in zip(per_domain, weights, strict=True):
        if weight:
            total = [sum_ + weight * count for sum_, count in zip(total, per_id, strict=True)]
    return total


def rank(
    per_id: Sequence[int], forced: Iterable[int], *, without_token: Collection[int] = ()
) -> Ranking:
    """Rank every id of the tokenizer.

    Args:
        per_id: [tokenizer_size] occurrences.
        forced: ids that come first.
        without_token: ids below the tokenizer's size that no token has; they are left out.
    """
    gaps = frozenset(without_token)
    first = sorted(set(forced))
    is_forced = frozenset(first)
    by_frequency = [target_id for target_id in range(len(per_id)) if target_id not in gaps]
    by_frequency.sort(key=per_id.__getitem__, reverse=True)  # stable: equal counts stay ascending
    others = [target_id for target_id in by_frequency if target_id not in is_forced]
    num_seen = len(first) + sum(1 for target_id in others if per_id[target_id])
    return Ranking(
        ids_target=(*first, *others),
        by_frequency=tuple(by_frequency),
        num_forced=len(first),
        num_seen=num_seen,
    )


def refusals(ranking: Ranking, sizes: Iterable[int], divisible_by: int) -> list[Diagnostic]:
    """Return SD421 for each size that cannot be built, with the nearest one that can.

    Args:
        ranking: of the ids.
        sizes: as asked for.
        divisible_by: ranks that share the head; 1: any size.
    """
    num_ids = len(ranking.ids_target)
    lowest = max(1, ranking.num_forced)
    problems: list[Diagnostic] = []
    for size in sizes:
        if size < 1:
            message = f"a map of {size} ids holds nothing"
        elif size > num_ids:
            message = f"a map of {size} ids does not fit a tokenizer of {num_ids} ids"
        elif size < lowest:
            message = f"a map of {size} ids cannot hold {ranking.num_forced} forced ids"
        elif size % divisible_by:
            problems.append(_indivisible(size, divisible_by, lowest, num_ids))
            continue
        else:
            continue
        problems.append(
            diagnose(
                "SD421",
                where=f"--size {size}",
                message=message,
                expected=f"{lowest} to {num_ids}",
                found=size,
            )
        )
    return problems


def _indivisible(size: int, divisible_by: int, lowest: int, num_ids: int) -> Diagnostic:
    below, above = size - size % divisible_by, size + -size % divisible_by
    near = [str(near) for near in (below, above) if lowest <= near <= num_ids]
    return diagnose(
        "SD421",
        where=f"--size {size}",
        message=f"a map of {size} ids cannot be shared by {divisible_by} ranks: "
        f"{size % divisible_by} rows are left over",
        expected=" or ".join(near) or f"a multiple of {divisible_by} from {lowest} to {num_ids}",
        found=size,
        help=f"Choose a multiple of {divisible_by}",
    )


def select(ranking: Ranking, per_id: Sequence[int], size: int) -> Selection:
    """Return the map of `size` ids.

    Args:
        ranking: of `per_id`.
        per_id: [tokenizer_size] weighted occurrences.
        size: ids in the map.

    Raises:
        DiagnosticError: SD421 when the forced ids do not fit or the tokenizer has fewer ids.
    """
    problems = refusals(ranking, (size,), 1)
    if problems:
        raise DiagnosticError(problems)
    chosen = sorted(ranking.ids_target[:size])
    displaced = sorted(set(ranking.by_frequency[:size]) - set(chosen))
    return Selection(
        ids_target=tuple(chosen),
        ids_by_rank=tuple(sorted(chosen, key=per_id.__getitem__, reverse=True)),
        displaced=tuple(displaced),
        num_unseen=max(0, size - ranking.num_seen),
    )
