"""The answer of `convert` and `normalize`: what was written, what was found, what would change."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import typer

from specctl.cli import output
from specctl.cli.words import count_text
from specctl.contract.text import printable
from specctl.ops.convert_report import ConvertReport
from specctl.ops.report import diagnostic_of

_SHOWN_INFOS = ("SD601", "SD608")
"""Infos on what is given up and on what waits for the user, who would not see them otherwise."""


def answer_report(report: ConvertReport, *, as_json: bool, is_normal_form: bool = False) -> None:
    """Print the report and exit 1 when nothing could be written.

    Problems and decisions go to stderr; a dry run's plan, or the JSON document, is the answer.

    Args:
        report: what was done.
        as_json: print the whole report.
        is_normal_form: of `normalize`, whose plan is what changes.
    """
    if as_json:
        names = {"source": printable(report.source), "output": printable(report.output)}
        output.answer_json(msgspec.structs.replace(report, **names))
    else:
        for item in report.diagnostics:
            show = output.talk_diagnostic if item.code in _SHOWN_INFOS else output.talk_problem
            show(diagnostic_of(item))
        if report.state == "planned":
            for line in _changes(report) if is_normal_form else _tensors(report):
                output.answer(line)
        output.talk(_summary(report))
    if report.state == "refused":
        raise typer.Exit(1)


def _summary(report: ConvertReport) -> str:
    if report.state == "refused":
        num_errors = sum(1 for item in report.diagnostics if item.severity == "error")
        return f"nothing was written: {count_text(num_errors, 'error')}"
    size = sum(file.size_bytes for file in report.files)
    count = sum(file.num_tensors for file in report.files)
    parts = [
        report.written_format or "",
        count_text(count, "tensor") if count else "",
        f"{size:,} bytes",
    ]
    what = ", ".join(part for part in parts if part)
    if report.fixes:
        what += f"; fixes: {', '.join(report.fixes)}"
    words = {
        "planned": f"would write {report.output}: {what}",
        "unchanged": f"{report.output} is there already and equal: {what}",
        "written": f"wrote {report.output}: {what}",
    }
    return words[report.state]


def _changes(report: ConvertReport) -> Iterator[str]:
    for change in report.config_changes:
        if change.before is not None:
            yield f"- config.json#{change.pointer}: {change.before}"
        if change.after is not None:
            yield f"+ config.json#{change.pointer}: {change.after}"
    for rename in report.renames:
        yield f"~ {rename.before or 'nothing'} -> {rename.after or 'nothing'}"
    if not report.config_changes and not report.renames:
        yield "no field and no tensor would change"


def _tensors(report: ConvertReport) -> Iterator[str]:
    for tensor in report.tensors:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        yield f"{tensor.file}::{tensor.key} {tensor.dtype} {shape} <- {tensor.source}"
