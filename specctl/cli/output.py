"""The one place that prints: answers to stdout, talk to stderr.

Invariants: nothing but the answer reaches stdout, so it can be piped in every mode; progress is
drawn on stderr, only on a terminal, and never in a file or a log.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from specctl.contract.diagnostics import Diagnostic

_NARROWEST, _USUAL_WIDTH, _WIDEST = 40, 100, 200


class Format(str, Enum):
    """How an answer is written; `commands/validate.py` says what each is for."""

    human = "human"
    concise = "concise"
    json = "json"
    jsonl = "jsonl"
    github = "github"
    sarif = "sarif"
    junit = "junit"


def answer(text: str) -> None:
    """Write the answer of the command, or a part of it, to stdout."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def answer_part(text: str) -> None:
    """Write a piece of a streamed answer to stdout as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def answer_json(value: Any) -> None:
    """Write one JSON document to stdout; the keys keep their order."""
    answer(json_text(value))


def json_text(value: Any) -> str:
    """Return a value as indented JSON, its keys in their order."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def talk(text: str) -> None:
    """Write a message about the work, not a part of the answer, to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def talk_diagnostic(diagnostic: Diagnostic) -> None:
    """Write a finding to stderr."""
    from specctl.cli import render

    talk(render.human(diagnostic, color=has_color(sys.stderr), width=width(sys.stderr)))


def talk_problem(diagnostic: Diagnostic) -> None:
    """Write a finding to stderr unless it is an info."""
    if diagnostic.severity != "info":
        talk_diagnostic(diagnostic)


@contextmanager
def writing(path: Path | str, option: str = "--output") -> Iterator[None]:
    """Turn a refusal of the system to write a file into wrong usage that names the path."""
    import typer

    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise typer.BadParameter(
            f"`{path}` cannot be written: {reason}", param_hint=option
        ) from error


def has_color(stream: TextIO) -> bool:
    """Tell whether color may be written: a terminal that is not dumb, and NO_COLOR is not set."""
    is_refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_refused


def width(stream: TextIO) -> int | None:
    """Return the columns to wrap at; None for a file or pipe, whose lines are left whole.

    COLUMNS, where it is set, counts for both.
    """
    if not stream.isatty() and not os.environ.get("COLUMNS"):
        return None
    return min(max(shutil.get_terminal_size((_USUAL_WIDTH, 24)).columns, _NARROWEST), _WIDEST)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """Draw a bar on stderr while the body runs; yields a function that takes the step's name.

    Nothing is drawn (and rich is not imported) when stderr is not a terminal or there is one step.
    """
    if total < 2 or not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda step: bars.update(task, advance=1, description=f"{label} {step}")


@contextmanager
def bar(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Draw one bar on stderr that is told (label, steps done, steps); nothing off a terminal."""
    if not sys.stderr.isatty():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda label, done, total: bars.update(
            task, description=label, completed=done, total=total
        )
