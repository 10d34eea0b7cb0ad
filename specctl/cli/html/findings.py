"""The findings of a report, the worst first, and what engines make of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from specctl.cli.html.markup import code, escaped, prose, section, table
from specctl.contract.codes import CODES
from specctl.ops.report import Finding, InspectReport

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


def engines_section(report: InspectReport) -> str:
    """Return the verdicts of engines as a table, empty when the report has none."""
    found: Any = msgspec.to_builtins(getattr(report, "engines", None))
    rows: list[Mapping[str, Any]] = [row for row in found or () if isinstance(row, dict)]
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[prose(_plain(row.get(name))) for name in names] for row in rows]
    head = [name.replace("_", " ") for name in names]
    return section("Engines", table(head, lines, caption="What each engine does with it"))


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return str(value)
