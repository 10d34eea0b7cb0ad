"""`specctl inspect`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from specctl.cli import output
from specctl.cli.inspect_text import inspect_text
from specctl.ops.inspect import inspect as run_inspect


def inspect(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Directory of a draft or target.")
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="Target that the draft is for."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
) -> None:
    """Show every fact of a draft or target, and where it was found.

    Reads config, headers, the index and the map tensors; no weights. Exit 1 when a finding is an
    error.
    """
    report = run_inspect(source, target)
    if json:
        output.answer_json(report)
    else:
        output.answer(inspect_text(report, color=output.has_color(sys.stdout)))
    if any(item.severity == "error" for item in report.diagnostics):
        raise typer.Exit(1)
