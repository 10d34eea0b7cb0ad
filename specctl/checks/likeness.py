"""How alike a draft's embedding or head and its target's are: the same, trained from it, unrelated.

Rows are compared by id: row i of a reduced head belongs to the target id that the map gives.
Equality is byte by byte over all rows; likeness is the mean cosine of rows from all over, against
that of the same rows with the ids of each other: rows of one trained table all lean to one side.
*Source:* TorchSpec issue 38: one engine replaces a draft's embedding, another keeps it when it
differs, and an exporter had written a random one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specctl.checkpoint import Checkpoint, TensorEntry
from specctl.checks.scan import ELEMENT_BYTES, cosine, floats, pieces
from specctl.contract.diagnostics import Diagnostic, diagnose

SAMPLE = 128
ROUNDING_ABOVE = 0.9999  # rounding to bf16 turns a row by about a thousandth
UNRELATED_BELOW = 0.2  # rows of unrelated tables of a hundred columns and more stay below a tenth
RELATED_ABOVE_OTHERS = 0.1  # what a row must have in common with its own id beyond other ids
OTHER_READING_ABOVE = 0.3  # SmolLM2's drafts: 0.95 with their map, 0.33 with one shifted by one id


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """An embedding or head in its files."""

    checkpoint: Checkpoint
    entry: TensorEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """The verdict.

    Args:
        kind: `equal` (same bytes in every row), `trained` or `unrelated`.
        cosine: mean over the compared rows.
        num_rows: rows that were compared.
    """

    kind: Literal["equal", "trained", "unrelated"]
    cosine: float
    num_rows: int


def compare(ours: Table, theirs: Table, ids_target: Sequence[int] | None) -> Likeness | None:
    """Return how alike the tables are, None when they cannot be compared.

    Args:
        ours: the draft's [R, H].
        theirs: the target's [V, H].
        ids_target: target id of each of our rows; None when row i is id i.

    Raises:
        DiagnosticError: SD108, SD135 when a file cannot be read.
    """
    mine, other = ours.entry, theirs.entry
    if len(mine.shape) != 2 or len(other.shape) != 2 or mine.shape[1] != other.shape[1]:
        return None
    ids = range(min(mine.shape[0], other.shape[0])) if ids_target is None else ids_target
    pairs = _pairs(ours, theirs, ids)
    chosen = _sample(pairs)
    found = _mean_cosine(ours, theirs, chosen)
    if found is None:
        return None
    mean, num_rows = found
    is_equal = mine.dtype == other.dtype and all(
        _row(ours, row) == _row(theirs, token) for row, token in chosen
    )
    if is_equal and _is_same(ours, theirs, pairs):
        return Likeness(kind="equal", cosine=1.0, num_rows=len(pairs))
    tokens = [token for _, token in chosen]
    crossed = list(zip((row for row, _ in chosen), tokens[1:] + tokens[:1], strict=True))
    others = _mean_cosine(ours, theirs, crossed)
    least = max(UNRELATED_BELOW, 0.0 if others is None else others[0] + RELATED_ABOVE_OTHERS)
    kind: Literal["trained", "unrelated"] = "unrelated" if mean < least else "trained"
    return Likeness(kind=kind, cosine=mean, num_rows=num_rows)


def check_map_rows(
    ours: Table, theirs: Table, ids_target: Sequence[int], where: str
) -> Iterator[Diagnostic]:
    """Yield SD532 when the rows of a reduced head are those of other ids than the map says.

    Args:
        ours: the draft's head [R, H].
        theirs: the target's [V, H].
        ids_target: target id of each of our rows.
        where: place of the map.

    Raises:
        DiagnosticError: SD108, SD135 when a file cannot be read.
    """
    if len(ours.entry.shape) != 2 or ours.entry.shape[1:] != theirs.entry.shape[1:]:
        return
    stated = _mean_cosine(ours, theirs, _sample(_pairs(ours, theirs, ids_target)))
    if stated is None or stated[0] > 1.0 - OTHER_READING_ABOVE:
        return
    readings = {
        "each id one higher": [token + 1 for token in ids_target],
        "each id one lower": [token - 1 for token in ids_target],
        "the same ids in ascending order": sorted(ids_target),
        f"the first {len(ids_target)} ids": list(range(len(ids_target))),
    }
    for name, ids in readings.items():
        found = _mean_cosine(ours, theirs, _sample(_pairs(ours, theirs, ids)))
        if found is not None and found[0] > stated[0] + OTHER_READING_ABOVE:
            yield diagnose(
                "SD532",
                where=where,
                message=f"the rows of `{ours.entry.key}` are those of {name}: mean cosine "
                f"{found[0]:.3f} to the target's, and {stated[0]:.3f} under the map",
                expected=f"cosine {found[0]:.3f}",
                found=f"cosine {stated[0]:.3f}",
            )
            return


def _pairs(ours: Table, theirs: Table, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return (row of ours, row of theirs) for the ids that both tables have."""
    rows, tokens = ours.entry.shape[0], theirs.entry.shape[0]
    return [(row, token) for row, token in enumerate(ids[:rows]) if 0 <= token < tokens]


def _sample(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return pairs[:: max(1, len(pairs) // SAMPLE)][:SAMPLE]


def _mean_cosine(
    ours: Table, theirs: Table, pairs: Sequence[tuple[int, int]]
) -> tuple[float, int] | None:
    """Return the mean over pairs without a zero row, and their number; None without any."""
    total, num_rows = 0.0, 0
    for row, token in pairs:
        first, second = _row(ours, row), _row(theirs, token)
        values = floats(ours.entry.dtype, first), floats(theirs.entry.dtype, second)
        if values[0] is None or values[1] is None:
            return None
        if any(first) and any(second):
            total += cosine(values[0], values[1])
            num_rows += 1
    return (total / num_rows, num_rows) if num_rows else None


def check_likeness(
    role: Literal["embedding", "head"],
    ours: Table,
    theirs: Table,
    ids_target: Sequence[int] | None = None,
) -> Iterator[Diagnostic]:
    """Yield one of SD525, SD526 and SD527; nothing when the tables cannot be compared.

    A head may be trained from nothing, so an unrelated one is an info.

    Raises:
        DiagnosticError: SD108, SD135 when a file cannot be read.
    """
    found = compare(ours, theirs, ids_target)
    if found is None:
        return
    code = {"equal": "SD525", "trained": "SD526", "unrelated": "SD527"}[found.kind]
    key, rows = ours.entry.key, found.num_rows
    yield diagnose(
        code,
        where=ours.entry.describe(),
        message={
            "equal": f"all {rows} rows of `{key}` are the target's",
            "trained": f"`{key}` is the target's {role} up to rounding, over {rows} compared rows"
            if found.cosine > ROUNDING_ABOVE and ours.entry.dtype != theirs.entry.dtype
            else f"`{key}` differs from the target's {role}: mean cosine {found.cosine:.3f} over "
            f"{rows} rows",
            "unrelated": f"`{key}` has nothing of the target's {role}: mean cosine "
            f"{found.cosine:.3f} over {rows} rows",
        }[found.kind],
        expected=f"rows like `{theirs.entry.key}`" if found.kind == "unrelated" else None,
        found=f"cosine {found.cosine:.3f}" if found.kind == "unrelated" else None,
        severity="info" if role == "head" else None,
    )


def check_mask_row(embedding: Table, token: int) -> Iterator[Diagnostic]:
    """Yield SD529 when the target's embedding, which the draft uses, has a zero row for the mask.

    Raises:
        DiagnosticError: SD108, SD135 when the file cannot be read.
    """
    entry = embedding.entry
    if len(entry.shape) == 2 and 0 <= token < entry.shape[0] and not any(_row(embedding, token)):
        yield diagnose(
            "SD529",
            where=f"target {entry.describe()}",
            message=f"row {token} of `{entry.key}`, the mask token's, is zero",
            expected="a trained row",
            found="zeros",
        )


def _row(table: Table, row: int) -> bytes:
    entry = table.entry
    size = entry.shape[1] * ELEMENT_BYTES.get(entry.dtype, 1)
    begin = entry.begin + row * size
    return table.checkpoint.read_range(entry.file, begin, begin + size, where=entry.describe())


def _is_same(ours: Table, theirs: Table, pairs: Sequence[tuple[int, int]]) -> bool:
    """Compare all rows, each table read once; a row is held as a 64-bit hash."""
    wanted = {token: row for row, token in pairs}
    hashes: dict[int, int] = {}
    for token, data in _rows(theirs):
        row = wanted.get(token)
        if row is not None:
            hashes[row] = hash(data)
    return all(hashes.get(row, hash(data)) == hash(data) for row, data in _rows(ours))


def _rows(table: Table) -> Iterator[tuple[int, bytes]]:
    entry = table.entry
    size = entry.shape[1] * ELEMENT_BYTES[entry.dtype]
    index = 0
    for piece in pieces(table.checkpoint, entry, size):
        for place in range(0, len(piece), size):
            yield index, piece[place : place + size]
            index += 1
