"""What drafts made of numbered heads share: counting them, and tables with the numbers filled in.

Invariants: counts come from the tensor names, bounded by `MAX_HEADS`; a config that says another
number is SD328. Role tables of these formats are made for the counts of one file, because their
names hold two numbers and `contract.roles` holds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.checkpoint import Checkpoint
from specctl.contract.manifest import TensorRef
from specctl.contract.roles import ALWAYS, TensorRole
from specctl.formats.assemble import is_whole, main_file
from specctl.formats.fields import Fields
from specctl.formats.names import FileTables, Ignored, Matched, Name, NameTable

MAX_HEADS = 64  # a single name with a huge number must not make a table of that many rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One tensor of a file that is made of numbered heads.

    Args:
        role: canonical role with its numbers.
        keys: spellings in files.
        shape: as stored, in symbols.
        when: `always`, `optional` or a condition's word, as in `TensorRole`.
    """

    role: str
    keys: tuple[str, ...]
    shape: tuple[str, ...]
    when: str = ALWAYS


def table(rows: Iterable[Row], ignored: tuple[Ignored, ...] = ()) -> FileTables:
    """Return the two tables of the rows."""
    rows = tuple(rows)
    return FileTables(
        names=NameTable(
            names=tuple(Name(role=row.role, keys=row.keys) for row in rows), ignored=ignored
        ),
        roles=tuple(TensorRole(name=row.role, shape=row.shape, when=row.when) for row in rows),
    )


def match(
    checkpoint: Checkpoint, tables: FileTables, root: Fields, *, conditions: frozenset[str]
) -> Matched:
    """Assign the file's tensors, and report what is missing (SD501) when all could be read."""
    matched = tables.names.match(checkpoint.tensors, root.findings)
    if is_whole(checkpoint):
        tables.names.report_missing(
            tables.roles,
            matched,
            root.findings,
            conditions=conditions,
            num_layers=0,
            num_aux_states=0,
            file=main_file(checkpoint),
        )
    return matched


def numbers(keys: Iterable[str], pattern: str, group: int = 1) -> tuple[int, ...]:
    """Return the numbers below `MAX_HEADS` that a group of `pattern` has in the keys, ascending."""
    matches = re.compile(pattern).fullmatch
    found = {int(hit[group]) for key in keys if (hit := matches(key)) and len(hit[group]) < 4}
    return tuple(sorted(number for number in found if number < MAX_HEADS))


def count_heads(root: Fields, key: str, found: int) -> int:
    """Return the number of heads in the file; SD328 when the config states another one.

    Without readable weights the config's number stands.
    """
    stated = root.integer(key, maximum=MAX_HEADS) if root.has(key) else None
    if found and stated is not None and stated != found:
        root.findings.add(
            "SD328",
            where=root.where(key),
            message=f"`{key}` is {stated} and the file holds {found} heads",
            expected=found,
            found=stated,
        )
    return found or stated or 0


def report_blocks(root: Fields, key: str, found: int) -> None:
    """Report SD310 when the config states another number of blocks in each head."""
    stated = root.integer(key, minimum=0) if root.has(key) else None
    if stated is not None and found and stated != found:
        root.findings.add(
            "SD310",
            where=root.where(key),
            message=f"`{key}` is {stated} and each head in the file has {found} blocks",
            expected=found,
            found=stated,
        )


def with_sizes(root: Fields, sizes: Mapping[str, int | None], rule: str) -> Fields:
    """Return a config object in which sizes that only tensors tell stand in for absent keys."""
    known = {key: size for key, size in sizes.items() if size is not None}
    return root.with_defaults(MappingProxyType(known), rule)


def rows_of(ref: TensorRef | None) -> int | None:
    """Return the rows of a stored matrix, None without one."""
    return ref.shape[0] if ref is not None and ref.shape else None
