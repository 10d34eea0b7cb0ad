"""The findings of a report, the worst first, and what engines make of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from specctl.cli.html.markup import code, escaped, prose, section, table
from specctl.cli.words import OUTCOMES
from specctl.contract.codes import CODES
from specctl.ops.report import EngineReport, Finding

_ORDER = ("error", "warning", "info")


def findings_section(findings: Iterable[Finding]) -> str:
    """Return every finding as an article; a sentence when there is none."""
    ordered = sorted(findings, key=lambda item: _ORDER.index(item.severity))
    if not ordered:
        return section("Findings", "<p>None.</p>")
    return section("Findings", "\n".join(_article(item) for item in ordered))


def _article(item: Finding) -> str:
    values = [
        f"<div><dt>{label}</dt><dd>{prose(value)}</dd></div>"
        for label, value in (("expected", item.expected), ("found", item.found))
        if value is not None
    ]
    parts = [
        f'<h3><span class="severity">{item.severity}</span> {item.code} {escaped(item.slug)}</h3>',
        f"<p>{prose(item.message)}</p>",
        f'<p class="place">{code(item.where)}</p>',
        f"<dl>{''.join(values)}</dl>" if values else "",
        "" if item.help is None else f"<p><strong>Help:</strong> {prose(item.help)}</p>",
        *(f'<p class="reason">{prose(note)}</p>' for note in item.notes),
        f"<details><summary>Why it matters</summary><p>{prose(CODES[item.code].why)}</p></details>",
    ]
    body = "\n".join(part for part in parts if part)
    return f'<article class="finding {item.severity}">\n{body}\n</article>'


def engines_section(engines: Iterable[EngineReport]) -> str:
    """Return the verdicts of engines with what they rest on, empty for none."""
    listed = tuple(engines)
    if not listed:
        return ""
    rows = (
        (escaped(e.engine), _outcome(e.outcome), escaped(e.version), prose(e.checked_on))
        for e in listed
    )
    head = ("engine", "with this draft", "newest read", "read in all")
    summary = table(head, rows, caption="What each engine does with this draft")
    return section("Engines", summary + "".join(_reasons(item) for item in listed if item.rows))


def _reasons(item: EngineReport) -> str:
    rows = (
        (
            escaped(row.name),
            _outcome(row.outcome) + ("" if row.is_current else " (older releases)"),
            prose(row.reason),
            escaped(row.versions),
            escaped(row.source),
        )
        for row in item.rows
    )
    head = ("rule", "outcome", "why", "releases", "source")
    inner = table(head, rows, caption=f"Rules of {item.engine}", is_prose=True)
    return f"<details><summary>{escaped(item.engine)}: reasons</summary>\n{inner}</details>"


def _outcome(outcome: str) -> str:
    return f'<span class="outcome {outcome}">{escaped(OUTCOMES[outcome])}</span>'
