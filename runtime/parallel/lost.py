"""How a peer that does not answer, or does something else than the others, is reported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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


def disagreement(others: Sequence[int], headers: Sequence[Sequence[int]]) -> Diagnostic:
    """Return SD859 for ranks that have done something else than the first.

    Args:
        others: these ranks.
        headers: step and digest of every rank, then what it brought.
    """
    first = headers[0]
    named = ", ".join(
        f"rank {rank}: step {headers[rank][0]}, digest {headers[rank][1]:016x}" for rank in others
    )
    return diagnose(
        "SD859",
        where="tensor parallel",
        message=f"{'ranks' if len(others) > 1 else 'rank'} {', '.join(map(str, others))} committed "
        "other ids than rank 0",
        expected=f"step {first[0]}, digest {first[1]:016x}",
        found=named,
    )


def first_line(error: Exception) -> str:
    """Return what a library says without its source lines and its advice."""
    line = str(error).partition("\n")[0].partition(". ")[0]
    return _SOURCE_LINE.sub("", line) or type(error).__name__
