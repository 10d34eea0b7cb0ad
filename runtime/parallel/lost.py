"""How a peer that does not answer is reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_SOURCE_LINE = re.compile(r"^\[[^\]]*\] ")


def lost_peer(found: str) -> Diagnostic:
    """Return SD855 for a stage that does not answer."""
    return diagnose(
        "SD855",
        where="pipeline",
        message="a neighbouring stage is gone or silent",
        expected="a message within the time limit",
        found=found,
    )


@contextmanager
def lost_as_diagnostic() -> Iterator[None]:
    """Turn what the library of the connections raises into SD855."""
    try:
        yield
    except RuntimeError as error:
        raise DiagnosticError(lost_peer(first_line(error))) from error


def first_line(error: Exception) -> str:
    """Return what a library says without its source lines and its advice."""
    line = str(error).partition("\n")[0].partition(". ")[0]
    return _SOURCE_LINE.sub("", line) or type(error).__name__
