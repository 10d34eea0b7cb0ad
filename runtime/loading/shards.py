"""Which part of a stored tensor a rank reads, by the role that the tensor has.

Attention heads and MLP features are split evenly; vocabularies are padded with zero rows so that
every rank has as many. Everything else is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.models import rank_rows
from runtime.models.layers import SPLIT_COLUMNS, SPLIT_ROWS
from runtime.parallel.ranks import Ranks

_VOCABULARY = frozenset(("embedding", "head"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of a tensor along one dimension.

    Args:
        dim: 0 rows, 1 columns.
        start: first index that is read.
        stop: one past the last; the same as `start` reads nothing.
        size: length of the part; what is beyond the stored indices is zero.
    """

    dim: int
    start: int
    stop: int
    size: int


def shard_of(
    role: str, shape: tuple[int, ...], ranks: Ranks, *, least_rows: int = 0
) -> Shard | None:
    """Return what a rank reads of a tensor; None: all of it.

    Args:
        role: as in `specctl.contract.roles`, with the layer prefix.
        shape: of the whole tensor; split dimensions divide by the ranks (SD852 was asked before).
        ranks: of the stage.
        least_rows: a tensor of fewer rows is padded with zero rows, before it is split.
    """
    num_rows = max(shape[0], least_rows)
    is_split = role in _VOCABULARY and ranks.size > 1
    if num_rows > shape[0] and not is_split:
        return Shard(dim=0, start=0, stop=shape[0], size=num_rows)
    if ranks.size == 1:
        return None
    name = ".".join(role.split(".")[-2:])
    if is_split:
        size = rank_rows(num_rows, ranks.size)
        start = min(ranks.rank * size, shape[0])
        return Shard(dim=0, start=start, stop=min(start + size, shape[0]), size=size)
    dim = 0 if name in SPLIT_ROWS else 1 if name in SPLIT_COLUMNS else None
    if dim is None:
        return None
    size, rest = divmod(shape[dim], ranks.size)
    assert rest == 0, f"{role} has {shape[dim]} of dimension {dim}, {ranks.size} ranks"
    return Shard(dim=dim, start=ranks.rank * size, stop=(ranks.rank + 1) * size, size=size)
