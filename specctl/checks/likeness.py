"""How alike a draft's embedding or head and its target's are: the same, trained from it, unrelated.

Rows are compared by id: row i of a reduced head belongs to the target id that the map gives.
Equality is byte by byte over all rows; likeness is the mean cosine of rows from all over.
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
    pairs = [(row, token) for row, token in enumerate(ids) if 0 <= token < other.shape[0]]
    pairs = [(row, token) for row, token in pairs if row < mine.shape[0]]
    chosen = pairs[:: max(1, len(pairs) // SAMPLE)][:SAMPLE]
    total, num_rows, is_equal = 0.0, 0, mine.dtype == other.dtype
    for row, token in chosen:
        first, second = _row(ours, row), _row(theirs, token)
        is_equal = is_equal and first == second
        values = floats(mine.dtype, first), floats(other.dtype, second)
        if values[0] is None or values[1] is None:
            return None
        if any(first) and any(second):
            total += cosine(values[0], values[1])
            num_rows += 1
    if not num_rows:
        return None
    if is_equal and _is_same(ours, theirs, pairs):
        return Likeness(kind="equal", cosine=1.0, num_rows=len(pairs))
    mean = total / num_rows
    kind: Literal["trained", "unrelated"] = "unrelated" if mean < UNRELATED_BELOW else "trained"
    return Likeness(kind=kind, cosine=mean, num_rows=num_rows)


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
