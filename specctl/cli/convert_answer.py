"""The answer of `convert` and `normalize`: what was written, what was found, what would change."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from specctl.cli import output
from specctl.ops.convert_report import ConvertReport
from specctl.ops.report import diagnostic_of


def answer_report(report: ConvertReport, *, as_json: bool) -> None:
    """Print the report and exit 1 when nothing could be written.

    Problems go to stderr; a dry run's plan, or the JSON document, is the answer.
    """
    if as_json:
        output.answer_json(report)
    else:
        for item in report.diagnostics:
            output.talk_problem(diagnostic_of(item))
        for line in _plan(report) if report.state == "planned" else ():
            output.answer(line)
        output.talk(_summary(report))
    if report.state == "refused":
        raise typer.Exit(1)


def _summary(report: ConvertReport) -> str:
    if report.state == "refused":
        num_errors = sum(1 for item in report.diagnostics if item.severity == "error")
        return f"nothing was written: {num_errors} error{'' if num_errors == 1 else 's'}"
    size = sum(file.size_bytes for file in report.files)
    what = f"{report.written_format}, {len(report.tensors)} tensors, {size} bytes"
    words = {
        "planned": f"would write {report.output}: {what}",
        "unchanged": f"{report.output} is there already and equal: {what}",
        "written": f"wrote {report.output}: {what}",
    }
    return words[report.state]


def _plan(report: ConvertReport) -> Iterator[str]:
    for change in report.config_changes:
        if change.before is not None:
            yield f"- config.json#{change.pointer}: {change.before}"
        if change.after is not None:
            yield f"+ config.json#{change.pointer}: {change.after}"
    for rename in report.renames:
        yield f"~ {rename.before or 'nothing'} -> {rename.after or 'nothing'}"
    if report.config_changes or report.renames:
        return
    for tensor in report.tensors:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        yield f"{tensor.file}::{tensor.key} {tensor.dtype} {shape} <- {tensor.source}"
