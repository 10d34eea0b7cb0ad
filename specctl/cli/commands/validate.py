"""`specctl validate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from specctl.cli import output, render
from specctl.cli.inspect_text import counts_text
from specctl.cli.output import Format
from specctl.ops.report import (
    ValidateReport,
    ValidateResult,
    count_severities,
    diagnostic_of,
)
from specctl.ops.validate import validate as run_validate


def validate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="Checkpoints, manifests, or directories that hold some."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="Target that every draft is for."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="FILE",
            help="List of the codes that each fixture must give; exit 0 when all match.",
        ),
    ] = None,
    format: Annotated[
        Format, typer.Option("--format", help="Write as human, json or github.")
    ] = Format.human,
) -> None:
    """Check checkpoints and manifests.

    Exit 0: no error and no warning. Exit 1: a finding, or with --expect a difference from the
    list. Exit 2: wrong usage or a fault of specctl.
    """
    report = run_validate(sources, target=target, expect=expect, progress=_progress)
    if format is Format.json:
        output.answer_json(report)
    elif format is Format.github:
        _answer_github(report)
    else:
        _answer_human(report)
    if not report.is_clean:
        raise typer.Exit(1)


def _progress(total: int) -> AbstractContextManager[Callable[[str], None]]:
    return output.progress("validating", total)


def _answer_github(report: ValidateReport) -> None:
    if report.mismatches is not None:
        for mismatch in report.mismatches:
            output.answer(render.github_line("error", mismatch.source, mismatch.problem))
        return
    for result in report.results:
        for item in result.diagnostics:
            output.answer(render.github(diagnostic_of(item)))


def _answer_human(report: ValidateReport) -> None:
    if report.mismatches is not None:
        _answer_expected(report)
        return
    color = output.has_color(sys.stdout)
    for result in report.results:
        output.answer(_headline(result))
        for item in result.diagnostics:
            output.answer(render.human(diagnostic_of(item), color=color))
    if len(report.results) > 1:
        counts = counts_text(report.num_errors, report.num_warnings, report.num_infos)
        output.answer(f"{len(report.results)} sources: {counts}")


def _answer_expected(report: ValidateReport) -> None:
    mismatches = report.mismatches or ()
    for mismatch in mismatches:
        output.answer(f"{mismatch.source}: {mismatch.problem}")
        if mismatch.expected is not None:
            found = "nothing" if mismatch.found is None else " ".join(mismatch.found) or "no code"
            output.answer(f"   expected: {' '.join(mismatch.expected) or 'no code'}")
            output.answer(f"      found: {found}")
    total = len(report.results)
    output.answer(f"{total} fixtures, {len(mismatches)} different from the list")


def _headline(result: ValidateResult) -> str:
    kind = " ".join(filter(None, (result.kind, result.format))) or "unknown"
    against = f", for {result.target}" if result.target else ""
    num_errors, num_warnings, num_infos = count_severities(result.diagnostics)
    found = counts_text(num_errors, num_warnings, num_infos)
    is_clean = not num_errors and not num_warnings
    state = f"clean{f', {found}' if num_infos else ''}" if is_clean else found
    return f"{result.source}: {kind}{against}: {state}"
