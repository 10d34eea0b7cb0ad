"""Collect diagnostics while reading, so that one problem does not hide the next.

Invariants: order of discovery is kept; of each code at most `MAX_OF_A_CODE` are kept and the last
of them says how many more there are: a file of a million defects is explained by the first hundred.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from specctl.contract.diagnostics import Diagnostic, Severity, diagnose

MAX_OF_A_CODE = 100


class Findings:
    """A growing list of diagnostics with a cap for each code."""

    def __init__(self) -> None:
        """Begin with none."""
        self._items: list[Diagnostic] = []
        self._counts: dict[str, int] = {}
        self._last: dict[str, int] = {}

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
        severity: Severity | None = None,
    ) -> None:
        """Record one diagnostic; arguments as in `diagnose`."""
        if not self._has_room(code):
            return
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

    def keep(self, diagnostic: Diagnostic) -> None:
        """Record a finished diagnostic."""
        if self._has_room(diagnostic.code):
            self._items.append(diagnostic)

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        """Record finished diagnostics that have had their cap."""
        self._items.extend(diagnostics)

    def count(self, code: str, num_more: int) -> None:
        """Record that there are more findings of a code, of which one at least is listed."""
        if num_more:
            self._counts[code] += num_more

    def result(self) -> tuple[Diagnostic, ...]:
        """Return what was recorded, with the number of omitted ones as a note."""
        items = list(self._items)
        for code, count in self._counts.items():
            if count > MAX_OF_A_CODE:
                last = items[self._last[code]]
                note = f"{count - MAX_OF_A_CODE} more of {code} are not listed"
                items[self._last[code]] = msgspec.structs.replace(last, notes=(*last.notes, note))
        return tuple(items)

    def _has_room(self, code: str) -> bool:
        self._counts[code] = self._counts.get(code, 0) + 1
        if self._counts[code] > MAX_OF_A_CODE:
            return False
        self._last[code] = len(self._items)
        return True


def capped(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the diagnostics with the cap of `Findings`."""
    findings = Findings()
    for diagnostic in diagnostics:
        findings.keep(diagnostic)
    return findings.result()
