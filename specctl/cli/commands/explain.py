"""`specctl explain`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specctl.cli import output
from specctl.cli.shared_options import Json
from specctl.cli.wrapping import wrapped
from specctl.contract.codes import CODES, Code
from specctl.ops.explain import find_code, unknown_code

_WIDTH = 80


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="[CODE]", help="SD302 or its name; none: list all."),
    ] = None,
    json: Json = False,
) -> None:
    """Say what a diagnostic code means, why it matters and what to do about it."""
    if code is None:
        _list_codes(json)
        return
    entry = find_code(code)
    if entry is None:
        raise typer.BadParameter(unknown_code(code), param_hint="CODE")
    if json:
        output.answer_json(entry)
    else:
        output.answer(page(entry, min(output.width(sys.stdout) or _WIDTH, _WIDTH)))


def _list_codes(json: bool) -> None:
    if json:
        output.answer_json(list(CODES.values()))
        return
    width = max(len(entry.slug) for entry in CODES.values())
    for entry in CODES.values():
        output.answer(f"{entry.code}  {entry.severity:<7}  {entry.slug:<{width}}  {entry.summary}")


def page(entry: Code, width: int = _WIDTH) -> str:
    """Return the page of a code as terminal text."""
    parts = [f"{entry.code} {entry.severity} {entry.slug}", "", _wrap(entry.summary, width)]
    parts += ["", "Why it matters", _wrap(entry.why, width, "  ")]
    parts += ["", "What to do", _wrap(entry.fix, width, "  ")]
    if entry.source is not None:
        parts += ["", "Source", _wrap(entry.source, width, "  ")]
    return "\n".join(parts)


def _wrap(text: str, width: int, indent: str = "") -> str:
    return "\n".join(wrapped(text, width, first=indent, rest=indent))
