"""The whole page: head, style, sections in reading order.

Invariants: the same report gives the same bytes; the policy in the head forbids scripts and every
request, so the page behaves the same on a disk, in a mail and behind a firewall.
"""

from __future__ import annotations

from pathlib import Path

from specctl import __version__
from specctl.cli.html.facts import facts_section
from specctl.cli.html.findings import engines_section, findings_section
from specctl.cli.html.markup import code, escaped
from specctl.cli.html.tensor_map import tensors_section
from specctl.cli.html.vocabulary_map import vocabulary_section
from specctl.cli.words import counts_text, kind_text
from specctl.ops.report import InspectReport, count_severities

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page_text(report: InspectReport, draft_to_target: tuple[int, ...] | None) -> str:
    """Return the page as HTML.

    Args:
        report: what `inspect` found.
        draft_to_target: absolute target ids in draft-id order, None without a decided map.
    """
    source = report.roles.source
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    what = kind_text(source.role, source.format)
    counts = counts_text(*count_severities(report.diagnostics))
    sections = (
        findings_section(report.diagnostics),
        facts_section(report),
        engines_section(report.engines),
        vocabulary_section(report.vocabulary, draft_to_target),
        tensors_section(report.tensors),
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>specctl inspect: {escaped(source.path)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{code(source.path)}</h1>
<p>{escaped(what)}. Findings: {escaped(counts)}.</p>
</header>
<main>
{"".join(sections)}</main>
<footer><p>Written by specctl {escaped(__version__)}.</p></footer>
</body>
</html>
"""
