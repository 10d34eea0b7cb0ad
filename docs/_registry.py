"""The pages made from tables: which formats are read and written, and what engines do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from specctl.formats.format import Format
from specctl.formats.registry import DRAFT_FORMATS
from specctl.verdicts import ENGINES, RULES
from specctl.verdicts.rule import EXAMINED

Table = Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], list[str]]

_YES, _NO = "yes", "-"
_OUTCOMES = {"refused": "refused", "wrong": "loads, runs wrong", "loads": "loads"}


def format_table(table: Table) -> list[str]:
    """Return the marks of every draft format.

    Inspect and validate need a reader, normalize and convert a writer; any format with a reader can
    be the source of a conversion that its facts allow.
    """
    columns = ("format", "name", "algorithm", "place", "inspect", "validate", "normalize", "to")
    return [
        "A draft in any format that is inspected can be converted when its facts fit the other",
        "format; `to` marks the formats that `specctl convert --to NAME` writes.",
        "",
        *table(columns, (_format_row(entry) for entry in DRAFT_FORMATS)),
    ]


def _format_row(entry: Format) -> tuple[str, ...]:
    is_read = _YES if entry.read is not None else _NO
    is_written = _YES if entry.write is not None else _NO
    place = "in a target, or alone" if entry.is_bundled else "alone"
    algorithm = entry.algorithm or _NO
    name = f"`{entry.name}`"
    return entry.title, name, algorithm, place, is_read, is_read, is_written, is_written


def engines_page(notice: str, table: Table) -> str:
    """Return docs/reference/engines.md."""
    lines = ["# Engines", "", notice, ""]
    lines += [
        "What other engines are known to do with a draft. `specctl inspect` lists the rows that a",
        "draft meets; `specctl validate --engine NAME` makes findings of those that hold in the",
        "newest release that was read (SD212, SD213). No row means that nothing is known against",
        "a draft, not that it was run; for algorithms outside the list of an engine, nobody looked",
        "(`not examined`).",
        "",
        "Each row was read in the sources that its last column names, or in the issue; none was",
        "found by running the engine unless the row says so.",
        "",
    ]
    for engine, read in ENGINES.items():
        examined = ", ".join(sorted(EXAMINED[engine]))
        lines += [f"## {engine}", "", f"Read: {read}. Algorithms examined: {examined}.", ""]
        columns = ("rule", "outcome", "versions", "holds now", "what happens", "read in")
        lines += [*table(columns, _rule_rows(engine)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rule_rows(engine: str) -> Iterator[tuple[str, ...]]:
    for rule in RULES:
        if rule.engine == engine:
            yield (
                f"`{rule.name}`",
                _OUTCOMES[rule.outcome],
                rule.versions,
                _YES if rule.is_current else _NO,
                rule.reason,
                rule.source,
            )
