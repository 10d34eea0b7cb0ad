"""Diagnostics as data: one frozen value per problem, rendered elsewhere.

Invariants: every code is in `codes.CODES`; a diagnostic always names a place; the message is one
line and carries the numbers. Rendering lives in `specctl.cli`; nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from specctl.contract.codes import CODES
from specctl.contract.text import printable

Severity = Literal["error", "warning", "info"]
MAX_TEXT_CHARS = 2000


class Diagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about a checkpoint, manifest, configuration or request.

    Args:
        code: `SD` + three digits, a key of `codes.CODES`.
        severity: `error` (refused), `warning` (works, probably not what was meant), `info`.
        where: `file#/json/pointer`, `file::tensor[shape dtype]`, `manifest#/...` or `request=<id>`.
        message: one line, no trailing period, backticks around identifiers.
        expected: the right value, as text.
        found: the value that is there, as text.
        help: an action, a command if one exists.
        notes: further lines.
    """

    code: str
    severity: Severity
    where: str
    message: str
    expected: str | None = None
    found: str | None = None
    help: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The code's short name, such as `header-unreadable`."""
        return CODES[self.code].slug

    def oneline(self) -> str:
        """Return `CODE severity slug: message (where)` for logs and exception texts."""
        return f"{self.code} {self.severity} {self.slug}: {self.message} ({self.where})"


def diagnose(
    code: str,
    *,
    where: str,
    message: str,
    expected: object = None,
    found: object = None,
    help: str | None = None,
    notes: Iterable[str] = (),
    severity: Severity | None = None,
) -> Diagnostic:
    """Build a diagnostic; severity and help default to the code's own.

    Control characters in the texts, which come from names in files, are escaped, and what is longer
    than `MAX_TEXT_CHARS` is cut: a value in a file may be a megabyte.

    Raises:
        KeyError: `code` is not in the table (our bug, found by the test suite).
    """
    entry = CODES[code]
    return Diagnostic(
        code=code,
        severity=severity or entry.severity,
        where=_bounded(where),
        message=_bounded(message),
        expected=None if expected is None else _bounded(expected),
        found=None if found is None else _bounded(found),
        help=help or entry.fix,
        notes=tuple(notes),
    )


def _bounded(value: object) -> str:
    text = printable(value)
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


class DiagnosticError(Exception):
    """Raised by loaders with the same diagnostics that `validate` reports."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        """Hold one or more diagnostics; the text is one line for each."""
        items = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        if not items:
            raise ValueError("DiagnosticError needs at least one diagnostic")
        self.diagnostics: tuple[Diagnostic, ...] = items
        super().__init__("\n".join(d.oneline() for d in items))


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Tell whether any diagnostic has severity `error`."""
    return any(d.severity == "error" for d in diagnostics)
