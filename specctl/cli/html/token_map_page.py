"""The page of a token map: picture, maps, curve, assumptions, forced ids and files.

Invariants: as for `page`: the same report gives the same bytes, no script and no request.
"""

from __future__ import annotations

from pathlib import Path

from specctl import __version__
from specctl.cli.html.coverage_picture import coverage_svg
from specctl.cli.html.findings import findings_section
from specctl.cli.html.markup import code, escaped, prose, section, table
from specctl.cli.token_map_text import cost_rows, ids_text, shown_points
from specctl.ops.report import finding
from specctl.ops.token_map_report import TokenMapReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def token_map_page(report: TokenMapReport) -> str:
    """Return the page as HTML."""
    style = Path(__file__).with_name("style.css").read_text("utf-8")
    sizes = ", ".join(f"{built.size:,}" for built in report.maps)
    picture = coverage_svg(report).replace("<svg ", '<svg class="picture" ', 1)
    sections = (
        f"<figure>{picture}<figcaption>{_caption(report)}</figcaption></figure>",
        _maps(report),
        _curve(report),
        _slices(report),
        _cost(report),
        _forced(report),
        findings_section(finding(item) for item in report.diagnostics),
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>specctl token map: {escaped(sizes)} ids</title>
<style>
{style}figure {{ margin: 1rem 0; }}
figure .picture {{ height: auto; max-width: 64rem; }}
</style>
</head>
<body>
<header>
<h1>Token map: {escaped(sizes)} of {report.target_vocab_size:,} ids</h1>
<p>Tokenizer {code(report.tokenizer)}.</p>
</header>
<main>
{"".join(sections)}</main>
<footer><p>Written by specctl {escaped(__version__)}.</p></footer>
</body>
</html>
"""


def _caption(report: TokenMapReport) -> str:
    return escaped(
        f"Share of tokens inside the map by its size, spaced by what is lost, and the estimated "
        f"speed against the full head. The ground is shaded where the speed is nearly the best. "
        f"Sizes and speed are decided on {report.measured_on}."
    )


def _maps(report: TokenMapReport) -> str:
    rows = [
        (
            f"{built.size:,}",
            f"{built.size / report.target_vocab_size:.1%}",
            f"{built.coverage:.2%}",
            f"{built.estimate.accepted_drafts:.3f}",
            f"{built.estimate.speedup:.3f}",
            f"{built.num_unseen:,}",
            f"{len(built.displaced):,}",
        )
        for built in report.maps
    ]
    head = (
        "ids", "share #", "coverage #", "accepted drafts #", "speed #", "unseen ids #",
        "displaced ids #",
    )  # fmt: skip
    lines = [table(head, rows, caption="Maps that were written")]
    for built in report.maps:
        names = ", ".join(code(name) for name in built.files)
        displaced = f" Displaced: {escaped(ids_text(built.displaced))}." if built.displaced else ""
        lines.append(f"<p>{built.size:,} ids in {code(built.directory)}: {names}.{displaced}</p>")
    return section("Maps", "\n".join(lines))


def _curve(report: TokenMapReport) -> str:
    rows = [
        (
            f"{point.size:,}",
            f"{point.coverage:.3%}",
            f"{point.accepted_drafts:.3f}",
            f"{point.head_bytes / 1e6:,.1f}",
            f"{point.draft_s * 1e6:,.0f}",
            f"{point.round_s * 1e6:,.0f}",
            f"{point.speedup:.3f}",
        )
        for point in shown_points(report)
    ]
    head = (
        "ids", "coverage #", "accepted drafts #", "head MB #", "drafting us #", "round us #",
        "speed #",
    )  # fmt: skip
    text = (
        f"<p>Recommended: {report.recommended.size:,} ids, {escaped(report.recommended.text)}.</p>"
    )
    return section("Sizes", text + table(head, rows, caption="Estimates by size"))


def _slices(report: TokenMapReport) -> str:
    shown = shown_points(report)
    head = ("text", "tokens #", *(f"{point.size:,} #" for point in shown))
    rows = [
        (
            f"{escaped(part.kind)} {code(part.name)}"
            if part.kind != "all"
            else "all held-out text",
            f"{part.num_tokens:,}",
            *(f"{part.at(point.size):.2%}" for point in shown),
        )
        for part in report.slices
    ]
    return section("Coverage of each slice", table(head, rows, caption="Coverage by slice"))


def _cost(report: TokenMapReport) -> str:
    rows = [tuple(map(escaped, row)) for row in cost_rows(report.cost)]
    inner = table(("number", "value #", "where from"), rows, caption="Numbers of the cost model")
    return section("Cost model", f"<p>{prose(report.cost_model)}.</p>{inner}")


def _forced(report: TokenMapReport) -> str:
    rows = [
        (str(item.target_id), code(item.token), escaped(", ".join(item.reasons)))
        for item in report.forced
    ]
    inner = table(("id", "token", "why"), rows, caption="Forced ids", is_prose=True)
    return section("Forced ids", inner)
