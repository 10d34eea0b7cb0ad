"""A `validate` report as JUnit XML: one test case for each source.

Invariants: the text is well-formed XML 1.0 for any name or message: characters that XML cannot
hold are written as escapes. A source with an error or a warning fails; infos are its output.
*Source:* the Jenkins and Surefire reports that CI services read; XML 1.0 section 2.2 (Char).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from specctl.cli import render
from specctl.cli.words import counts_text
from specctl.ops.report import (
    Mismatch,
    ValidateReport,
    ValidateResult,
    count_severities,
    diagnostic_of,
)

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}


def junit_text(report: ValidateReport) -> str:
    """Return the XML document."""
    if report.mismatches is None:
        cases = [_case(result) for result in report.results]
    else:
        by_source = {item.source: item for item in report.mismatches}
        names = dict.fromkeys([*(result.source for result in report.results), *by_source])
        cases = [_expected_case(name, by_source.get(name)) for name in names]
    failures = sum(is_failure for is_failure, _ in cases)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="0"'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {counts}>"]
    lines.append(f'<testsuite name="specctl validate" {counts} skipped="0">')
    lines += [text for _, text in cases]
    return "\n".join([*lines, "</testsuite>", "</testsuites>"])


def _case(result: ValidateResult) -> tuple[bool, str]:
    kind = ".".join(filter(None, (result.kind, result.format))) or "unknown"
    problems = [item for item in result.diagnostics if item.severity != "info"]
    infos = [item for item in result.diagnostics if item.severity == "info"]
    body: list[str] = []
    if problems:
        codes = ", ".join(dict.fromkeys(item.code for item in problems))
        message = f"{counts_text(*count_severities(problems))}: {codes}"
        text = "\n\n".join(render.human(diagnostic_of(item)) for item in problems)
        body.append(
            f'<failure type="{xml_attribute(problems[0].slug)}" '
            f'message="{xml_attribute(message)}">{xml_text(text)}</failure>'
        )
    if infos:
        text = "\n\n".join(render.human(diagnostic_of(item)) for item in infos)
        body.append(f"<system-out>{xml_text(text)}</system-out>")
    return bool(problems), _element(result.source, kind, body)


def _expected_case(name: str, mismatch: Mismatch | None) -> tuple[bool, str]:
    if mismatch is None:
        return False, _element(name, "fixture", ())
    text = "\n".join(_codes(mismatch))
    message = xml_attribute(mismatch.problem)
    failure = f'<failure type="expected-codes" message="{message}">{xml_text(text)}</failure>'
    return True, _element(name, "fixture", (failure,))


def _codes(mismatch: Mismatch) -> Iterator[str]:
    for label, codes in (("expected", mismatch.expected), ("found", mismatch.found)):
        if codes is not None:
            yield f"{label}: {' '.join(codes) or 'no code'}"


def _element(name: str, kind: str, body: Iterable[str]) -> str:
    head = f'<testcase classname="specctl.{xml_attribute(kind)}" name="{xml_attribute(name)}"'
    inner = "".join(body)
    return f"{head}>{inner}</testcase>" if inner else f"{head}/>"


def xml_text(text: str) -> str:
    """Return text that may stand between tags."""
    plain = _NOT_XML.sub(lambda match: ascii(match.group())[1:-1], text)
    return "".join(_ENTITIES.get(char, char) for char in plain).replace("\r", "&#13;")


def xml_attribute(text: str) -> str:
    """Return text that may stand in a quoted attribute; line ends and tabs are kept."""
    return xml_text(text).replace("\t", "&#9;").replace("\n", "&#10;")
