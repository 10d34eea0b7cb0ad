"""`specctl explain`."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from specctl.cli import output
from specctl.contract.codes import CODES, Code
from specctl.ops.explain import find_code, nearest_codes


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="[CODE]", help="SD302 or its name; none: list all."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
) -> None:
    """Say what a diagnostic code means, why it matters and what to do about it."""
    if code is None:
        _list_codes(json)
        return
    entry = find_code(code)
    if entry is None:
        near = nearest_codes(code)
        hint = f"; did you mean {', '.join(f'`{name}`' for name in near)}?" if near else ""
        raise typer.BadParameter(f"there is no code `{code}`{hint}", param_hint="CODE")
    if json:
        output.answer_json(entry)
    else:
        output.answer(page(entry))


def _list_codes(json: bool) -> None:
    if json:
        output.answer_json(list(CODES.values()))
        return
    width = max(len(entry.slug) for entry in CODES.values())
    for entry in CODES.values():
        output.answer(f"{entry.code}  {entry.severity:<7}  {entry.slug:<{width}}  {entry.summary}")


def page(entry: Code) -> str:
    """Return the page of a code as terminal text, 80 columns."""
    parts = [f"{entry.code} {entry.severity} {entry.slug}", "", _wrap(entry.summary)]
    parts += ["", "Why it matters", _wrap(entry.why, "  ")]
    parts += ["", "What to do", _wrap(entry.fix, "  ")]
    if entry.source is not None:
        parts += ["", "Source", _wrap(entry.source, "  ")]
    return "\n".join(parts)


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        80,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
