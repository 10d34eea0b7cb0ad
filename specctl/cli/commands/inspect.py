"""`specctl inspect`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from specctl.checkpoint import Access
from specctl.cli import output
from specctl.cli.inspect_text import inspect_text
from specctl.cli.shared_options import AllowPickle, Deep, Json, Offline, Strict
from specctl.ops.inspect import Inspected, inspect_with_map
from specctl.ops.severity import severity_rules


def inspect(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Draft or target: a directory, hf:org/name or ms:org/name; or a token map.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="Target that the draft is for."),
    ] = None,
    json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page with a tensor map and a vocabulary map instead of the text.",
        ),
    ] = None,
    deep: Deep = False,
    strict: Strict = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Show every fact of a draft, target or token map, and where it was found.

    Reads config, headers, the index and the map tensors; weights with --deep only. Exit 1 when a
    finding is an error.
    """
    access = Access(offline=offline, allow_pickle=allow_pickle)
    rules = severity_rules(is_strict=strict)
    with output.bar("reading weights") if deep else nullcontext() as step:
        found = inspect_with_map(
            source,
            target,
            rules=rules,
            access=access,
            deep=step,
            is_listed=json or html is not None,
        )
    report = found.report
    if html is not None:
        _write_page(html, found)
    if json:
        output.answer_json(report)
    elif html is None:
        color, width = output.has_color(sys.stdout), output.width(sys.stdout)
        output.answer(inspect_text(report, color=color, width=width))
    if any(item.severity == "error" for item in report.diagnostics):
        raise typer.Exit(1)


def _write_page(path: Path, found: Inspected) -> None:
    from specctl.checkpoint import write_text_atomic
    from specctl.cli.html.page import page_text

    text = page_text(found.report, found.draft_to_target)
    with output.writing(path, "--html"):
        write_text_atomic(path, text)
    output.talk(f"wrote {path}")
