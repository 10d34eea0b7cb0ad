"""Collect diagnostics while reading, so that one problem does not hide the next.

Invariants: order of discovery is kept; per code and file at most `limit` entries are kept and the
last kept one says how many more there are, so a header with 90,000 defects stays readable.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from specctl.contract.diagnostics import Diagnostic, Severity, diagnose


class Findings:
    """A growing list of diagnostics with a cap for each code and file."""

    def __init__(self, limit: int = 20) -> None:
        self._limit = limit
        self._items: list[Diagnostic] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def add(
        self,
        code: str,
        *,
        where: str,
        message: str,
        expected: object = None,
        found: object = None,
        help: str | None = None,
        notes: Iterable[str] = (),
        is_error: bool | None = None,
    ) -> None:
        """Record one diagnostic; `is_error` overrides the code's severity (None keeps it)."""
        group = (code, where.partition("::")[0].partition("#")[0])
        count = self._counts.get(group, 0) + 1
        self._counts[group] = count
        if count > self._limit:
            return
        self._last[group] = len(self._items)
        severity: Severity | None = None
        if is_error is not None:
            severity = "error" if is_error else "warning"
        self._items.append(
            diagnose(
                code,
                where=where,
                message=message,
                expected=expected,
                found=found,
                help=help,
                notes=notes,
                severity=severity,
            )
        )

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Record finished diagnostics unchanged and uncapped."""
        self._items.extend(diagnostics)

    def result(self) -> tuple[Diagnostic, ...]:
        """Return what was recorded, with the number of omitted ones as a note."""
        items = list(self._items)
        for group, count in self._counts.items():
            if count > self._limit:
                place = self._last[group]
                note = f"{count - self._limit} more of {group[0]} in {group[1]} are not listed"
                items[place] = msgspec.structs.replace(
                    items[place], notes=(*items[place].notes, note)
                )
        return tuple(items)
