"""The answer of the commands that cut token maps: text or JSON, the page and the picture."""

from __future__ import annotations

import sys
from pathlib import Path

from specctl.checkpoint import write_text_atomic
from specctl.cli import output
from specctl.cli.token_map_text import report_text
from specctl.cli.wrapping import USUAL_WIDTH
from specctl.ops.token_map_report import TokenMapReport
from specctl.ops.token_map_slices import NOTHING

PAGE_FILE = "token_map.html"
PICTURE_FILE = "coverage.svg"
REPORT_FILE = "report.json"


def answer_report(report: TokenMapReport, directory: Path, *, is_json: bool) -> None:
    """Write report, page and picture into the directory, findings to stderr, the answer to stdout.

    A ranked list has no coverage, so it has no page and no picture.
    """
    written = [REPORT_FILE]
    write_text_atomic(directory / REPORT_FILE, output.json_text(report) + "\n")
    if report.measured_on != NOTHING:
        from specctl.cli.html.coverage_picture import coverage_svg
        from specctl.cli.html.token_map_page import token_map_page

        write_text_atomic(directory / PAGE_FILE, token_map_page(report))
        write_text_atomic(directory / PICTURE_FILE, coverage_svg(report))
        written += [PAGE_FILE, PICTURE_FILE]
    for diagnostic in report.diagnostics:
        output.talk_problem(diagnostic)
    if is_json:
        output.answer_json(report)
        return
    width = output.width(sys.stdout) or USUAL_WIDTH
    text = report_text(report, width=width, color=output.has_color(sys.stdout))
    output.answer(f"{text}\nreport in {directory}/\n  {'  '.join(written)}")
