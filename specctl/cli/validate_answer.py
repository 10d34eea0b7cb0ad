"""The answer of `validate` in each of its text forms, as an iterator of lines.

Invariants: every form is complete: each finding, or with a list of expectations each difference, is
in it once; the machine forms write nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import msgspec

from specctl.cli import output, render
from specctl.cli.output import Format
from specctl.cli.words import count_text, counts_text, kind_text
from specctl.cli.wrapping import wrapped
from specctl.ops.places import Place, find_places
from specctl.ops.report import (
    FindingLine,
    ValidateReport,
    ValidateResult,
    count_severities,
    diagnostic_of,
)

_Lines = Iterator[str]


def lines_of(report: ValidateReport, format: Format) -> _Lines:
    """Return the lines of the report in a format."""
    return _FORMATS[format](report)


def places_of(report: ValidateReport) -> Mapping[str, Place]:
    """Return the place of every finding by its `where`."""
    return find_places(item.where for result in report.results for item in result.diagnostics)


def _human(report: ValidateReport) -> _Lines:
    if report.mismatches is not None:
        yield from _expected(report)
        return
    color, width = output.has_color(sys.stdout), output.width(sys.stdout)
    for result in report.results:
        yield "\n".join(wrapped(_headline(result), width, rest="   "))
        for item in result.diagnostics:
            is_marked = item.fixable == "safe" and item.severity != "info"
            mark = render.FIXABLE_MARK if is_marked else ""
            yield render.human(diagnostic_of(item), color=color, width=width, mark=mark)
    yield from _fixable(report)
    if len(report.results) > 1 or report.num_ignored:
        yield _summary(report)


def _fixable(report: ValidateReport) -> _Lines:
    """Yield one line that says how many problems `normalize` repairs, and of which it could."""
    found = [item for result in report.results for item in result.diagnostics]
    kinds = [item.fixable for item in found if item.severity != "info"]
    safe, unsafe = kinds.count("safe"), kinds.count("unsafe")
    if safe or unsafe:
        more = f", {unsafe} more with `--unsafe-fixes`" if unsafe else ""
        yield f"[*] {safe} fixable with `specctl normalize`{more}"


def _summary(report: ValidateReport) -> str:
    has_any = report.num_errors or report.num_warnings or report.num_infos
    counts = counts_text(report.num_errors, report.num_warnings, report.num_infos)
    state = counts if has_any else "clean"
    ignored = f", {report.num_ignored} ignored" if report.num_ignored else ""
    return f"{count_text(len(report.results), 'source')}: {state}{ignored}"


def _headline(result: ValidateResult) -> str:
    kind = kind_text(result.kind, result.format)
    against = f", for {result.target}" if result.target else ""
    num_errors, num_warnings, num_infos = count_severities(result.diagnostics)
    found = counts_text(num_errors, num_warnings, num_infos)
    is_clean = not num_errors and not num_warnings
    state = f"clean{f', {found}' if num_infos else ''}" if is_clean else found
    return f"{result.source}: {kind}{against}: {state}"


def _expected(report: ValidateReport) -> _Lines:
    mismatches, width = report.mismatches or (), output.width(sys.stdout)
    for mismatch in mismatches:
        lines = wrapped(f"{mismatch.source}: {mismatch.problem}", width, rest="   ")
        if mismatch.expected is not None:
            found = "nothing" if mismatch.found is None else " ".join(mismatch.found) or "no code"
            expected = " ".join(mismatch.expected) or "no code"
            lines += wrapped(expected, width, first="   expected: ", rest=" " * 13)
            lines += wrapped(found, width, first="      found: ", rest=" " * 13)
        yield "\n".join(lines)
    yield f"{len(report.results)} fixtures, {len(mismatches)} different from the list"


def _concise(report: ValidateReport) -> _Lines:
    if report.mismatches is not None:
        for mismatch in report.mismatches:
            yield f"{mismatch.source}: {mismatch.problem}"
        return
    places = places_of(report)
    for result in report.results:
        for item in result.diagnostics:
            yield render.concise(diagnostic_of(item), places[item.where])
    yield _summary(report)


def _json(report: ValidateReport) -> _Lines:
    yield output.json_text(report)


def _jsonl(report: ValidateReport) -> _Lines:
    if report.mismatches is not None:
        for mismatch in report.mismatches:
            yield msgspec.json.encode(mismatch).decode()
        return
    places = places_of(report)
    for result in report.results:
        for item in result.diagnostics:
            place = places[item.where]
            line = FindingLine(
                **msgspec.structs.asdict(item),
                source=result.source,
                file=place.file,
                line=place.line,
                column=place.column,
            )
            yield msgspec.json.encode(line).decode()


def _github(report: ValidateReport) -> _Lines:
    if report.mismatches is not None:
        for mismatch in report.mismatches:
            yield render.github_line("error", Place(file=mismatch.source), mismatch.problem)
        return
    places = places_of(report)
    for result in report.results:
        for item in result.diagnostics:
            yield render.github(diagnostic_of(item), places[item.where])


def _sarif(report: ValidateReport) -> _Lines:
    from specctl.cli.sarif import sarif_log

    yield output.json_text(sarif_log(report, places_of(report)))


def _junit(report: ValidateReport) -> _Lines:
    from specctl.cli.junit import junit_text

    yield junit_text(report)


_FORMATS: Mapping[Format, Callable[[ValidateReport], _Lines]] = {
    Format.human: _human,
    Format.concise: _concise,
    Format.json: _json,
    Format.jsonl: _jsonl,
    Format.github: _github,
    Format.sarif: _sarif,
    Format.junit: _junit,
}
