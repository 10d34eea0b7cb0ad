"""The picture of a token map: coverage by size for each slice, and estimated speed below it.

Invariants: the same report gives the same bytes; one SVG that needs nothing else, light or dark by
the viewer's setting. Coverage is spaced by the logarithm of what is lost, so 99 % and 99.9 % are as
far apart as 90 % and 99 %; sizes are spaced by their logarithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2, log10

from specctl.cli.html.markup import escaped
from specctl.ops.token_map_report import TokenMapReport
from specctl.tokenmap.coverage import SliceCoverage

WIDTH, HEIGHT = 1000, 640
_LEFT, _RIGHT = 74, 716
_TOP, _MIDDLE, _LOWER, _BOTTOM = 92, 392, 440, 580
_LEGEND = 740
_MAX_SLICES = 9
_ORDER = {"all": 0, "outputs": 1, "domain": 2, "language": 3}
_MAX_MARKS = 4
_SLOWEST = 0.5  # slower sizes are drawn at the edge
_COVERAGES = (
    0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999,
)  # fmt: skip
_STYLE = """
svg{--ground:#fff;--text:#1b1f24;--quiet:#57606a;--line:#d8dee5;--soft:#eef3f8;--mark:#1b1f24;
--c0:#0072b2;--c1:#c44e00;--c2:#00805e;--c3:#9b4d87;--c4:#8c6d00;--c5:#5b5fc7;--c6:#b3315f;
--c7:#4d6b75;--c8:#6a4c2f;
font-family:system-ui,"Segoe UI","Helvetica Neue","DejaVu Sans",sans-serif}
@media (prefers-color-scheme:dark){svg{--ground:#14181d;--text:#e6eaef;--quiet:#a3adb8;
--line:#333c46;--soft:#1c2733;--mark:#e6eaef;--c0:#58b1e8;--c1:#f0894a;--c2:#3fc79a;--c3:#d694c4;
--c4:#d9b63c;--c5:#9a9df0;--c6:#f07fa6;--c7:#9fb6bf;--c8:#c9a27e}}
.ground{fill:var(--ground)}.soft{fill:var(--soft)}
text{fill:var(--text);font-size:13px}.quiet{fill:var(--quiet)}.title{font-size:18px;font-weight:600}
.head{font-size:13px;font-weight:600}.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--quiet);stroke-width:1}
.mark{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:2 3}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.whole{stroke-width:3.4}.dashed{stroke-dasharray:7 4}
""".replace("\n", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """A linear map from values to places.

    Args:
        low: value at `first`.
        high: value at `last`.
    """

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        inside = min(max(value, min(self.low, self.high)), max(self.low, self.high))
        span = self.high - self.low or 1.0
        return self.first + (inside - self.low) / span * (self.last - self.first)


def coverage_svg(report: TokenMapReport) -> str:
    """Return the picture as one SVG document."""
    sizes = [item.size for item in report.curve]
    across = _Scale(low=log2(sizes[0]), high=log2(sizes[-1]), first=_LEFT, last=_RIGHT)
    parts = _shown(report.slices)
    lines = [
        _head(report),
        _band(report, across),
        _coverage_panel(report, parts, across),
        _speed_panel(report, across),
        _marks(report, across),
        _legend(report, parts),
    ]
    label = f"Coverage and estimated speed of token maps for {report.tokenizer_size:,} ids"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escaped(label)}">\n<style>{_STYLE}</style>\n'
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _shown(slices: Sequence[SliceCoverage]) -> tuple[SliceCoverage, ...]:
    """Return the whole and the largest parts, in the order of the report."""
    ranked = sorted(slices, key=lambda part: (_ORDER[part.kind], -part.num_tokens, part.name))
    kept = {(part.kind, part.name) for part in ranked[:_MAX_SLICES]}
    return tuple(part for part in slices if (part.kind, part.name) in kept)


def size_text(size: int) -> str:
    """Return `32k` for 32,768 and `1,536` for a size that is no whole number of 1,024 ids."""
    return f"{size >> 10}k" if size % 1024 == 0 else f"{size:,}"


def _text(x: float, y: float, words: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escaped(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _head(report: TokenMapReport) -> str:
    corpus = report.corpus
    title = f"Token maps for a tokenizer of {report.tokenizer_size:,} ids"
    text = (
        f"{corpus.num_tokens:,} tokens of {corpus.num_documents:,} documents counted; coverage of "
        f"{report.measured_on}"
    )
    return "\n".join((_text(20, 34, title, "title"), _text(20, 56, text, "quiet")))


def _band(report: TokenMapReport, across: _Scale) -> str:
    """Return the ground behind the sizes that are nearly as fast as the best."""
    first = across(log2(report.recommended.near_low))
    width = across(log2(report.recommended.near_high)) - first
    return "".join(
        f'<rect class="soft" x="{first:.1f}" y="{top}" width="{max(width, 2.0):.1f}" '
        f'height="{bottom - top}"/>'
        for top, bottom in ((_TOP, _MIDDLE), (_LOWER, _BOTTOM))
    )


def _kept(coverage: float) -> float:
    """Return the place of a coverage: the negative logarithm of what is lost."""
    return -log10(max(1.0 - coverage, 1e-9))


def _coverage_scale(parts: Sequence[SliceCoverage]) -> _Scale:
    values = [point.coverage for part in parts for point in part.curve]
    lost = [1.0 - value for value in values if value < 1.0]
    best = 1.0 - min(lost, default=0.001)
    high = next((c for c in _COVERAGES if c >= best), _COVERAGES[-1])
    low = max((c for c in _COVERAGES if c <= min(values)), default=0.0)
    return _Scale(low=_kept(low), high=_kept(max(high, 0.9)), first=_MIDDLE, last=_TOP + 8)


def _coverage_panel(report: TokenMapReport, parts: Sequence[SliceCoverage], across: _Scale) -> str:
    up = _coverage_scale(parts)
    lines = [_text(20, _TOP - 12, "coverage", "head")]
    for coverage in _COVERAGES:
        if up.low <= _kept(coverage) <= up.high:
            y = up(_kept(coverage))
            lines.append(_line(_LEFT, y, _RIGHT, y, "grid"))
            lines.append(_text(_LEFT - 8, y + 4, f"{coverage * 100:g} %", "quiet end"))
    lines += _verticals(report, across, _TOP, _MIDDLE)
    for index, part in reversed(list(enumerate(parts))):
        points = [(across(log2(p.size)), up(_kept(p.coverage))) for p in part.curve]
        lines.append(_curve(points, index, part))
    return "\n".join(lines)


def _curve(points: Iterable[tuple[float, float]], index: int, part: SliceCoverage | None) -> str:
    place = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = "curve"
    if part is None or part.kind == "all":
        style += " whole"
    elif part.kind != "domain":
        style += " dashed"
    name = "estimated speed" if part is None else f"{part.kind} {part.name}"
    return (
        f'<polyline class="{style}" stroke="var(--c{index % _MAX_SLICES})" points="{place}">'
        f"<title>{escaped(name)}</title></polyline>"
    )


def _verticals(report: TokenMapReport, across: _Scale, top: float, bottom: float) -> list[str]:
    """Return the lines of sizes that are powers of two, and the axis."""
    lines = [
        _line(across(log2(size)), top, across(log2(size)), bottom, "grid")
        for size in _ticks(report)
    ]
    return [*lines, _line(_LEFT, bottom, _RIGHT, bottom, "axis")]


def _ticks(report: TokenMapReport) -> list[int]:
    sizes = [item.size for item in report.curve]
    return [1 << power for power in range(40) if sizes[0] <= 1 << power <= sizes[-1]]


def _speed_panel(report: TokenMapReport, across: _Scale) -> str:
    speeds = [item.speedup for item in report.curve]
    low, high = max(min(*speeds, 1.0), _SLOWEST), max(*speeds, 1.0)
    up = _Scale(low=low - 0.01, high=high + 0.01, first=_BOTTOM, last=_LOWER + 8)
    lines = [_text(20, _LOWER - 12, "estimated tokens/s, full head = 1", "head")]
    step = _nice_step(high - low)
    value = step * ceil(low / step - 1e-9)
    while value <= high + 1e-9:
        lines.append(_line(_LEFT, up(value), _RIGHT, up(value), "grid"))
        lines.append(_text(_LEFT - 8, up(value) + 4, f"{value:.2f}", "quiet end"))
        value += step
    lines += _verticals(report, across, _LOWER, _BOTTOM)
    points = [(across(log2(item.size)), up(item.speedup)) for item in report.curve]
    lines.append(_curve(points, 0, None))
    last = _LEFT - 100.0
    for size in _ticks(report):
        x = across(log2(size))
        if x - last >= 44 and x < _RIGHT - 60:
            lines.append(_text(x, _BOTTOM + 20, size_text(size), "quiet middle"))
            last = x
    lines.append(_text(_RIGHT, _BOTTOM + 20, f"all {report.curve[-1].size:,}", "quiet end"))
    lines.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, "ids in the map", "quiet middle"))
    best = report.recommended
    place = next(item for item in report.curve if item.size == best.size)
    lines.append(
        f'<circle cx="{across(log2(best.size)):.1f}" cy="{up(place.speedup):.1f}" r="5.5" '
        'fill="var(--c0)" stroke="var(--ground)" stroke-width="2"/>'
    )
    return "\n".join(lines)


def _nice_step(span: float) -> float:
    for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        if span / step <= 5:
            return step
    return 2.0


def _marks(report: TokenMapReport, across: _Scale) -> str:
    """Return a dotted line for each map that was written, with its size above."""
    sizes = [built.size for built in report.maps][:_MAX_MARKS]
    lines: list[str] = []
    last = -100.0
    for size in sizes:
        x = across(log2(size))
        lines.append(_line(x, _TOP, x, _MIDDLE, "mark"))
        lines.append(_line(x, _LOWER, x, _BOTTOM, "mark"))
        if x - last >= 52:
            last = max(x, _LEFT + 36)  # beside the name of the axis
            lines.append(_text(last, _TOP - 10, size_text(size), "middle"))
    return "\n".join(lines)


def _legend(report: TokenMapReport, parts: Sequence[SliceCoverage]) -> str:
    """Return names and numbers at the size of the first map, beside the panels."""
    built = report.maps[0]
    lines = [_text(_LEGEND, _TOP - 10, f"covered by {size_text(built.size)} ids", "head")]
    y = _TOP + 16.0
    for index, part in enumerate(parts):
        style = "curve" + (" whole" if part.kind == "all" else "")
        style += "" if part.kind in ("all", "domain") else " dashed"
        lines.append(
            f'<line class="{style}" stroke="var(--c{index % _MAX_SLICES})" x1="{_LEGEND}" '
            f'y1="{y - 4:.1f}" x2="{_LEGEND + 24}" y2="{y - 4:.1f}"/>'
        )
        lines.append(_text(_LEGEND + 32, y, _short(part.name)))
        lines.append(_text(WIDTH - 20, y, f"{part.at(built.size):.2%}", "end"))
        y += 24
    hidden = len(report.slices) - len(parts)
    if hidden:
        lines.append(_text(_LEGEND + 32, y, f"and {hidden} more in the table", "quiet"))
    return "\n".join(lines + _speed_words(report))


def _short(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:18]}.."


def _speed_words(report: TokenMapReport) -> list[str]:
    best = report.recommended
    place = next(item for item in report.curve if item.size == best.size)
    full = report.curve[-1].head_bytes or 1
    rows = (
        ("recommended", f"{best.size:,} ids"),
        ("estimated speed", f"{place.speedup:.3f}"),
        ("head bytes kept", f"{place.head_bytes / full:.1%}"),
        ("tokens lost", f"{1 - place.coverage:.2%}"),
        ("nearly as fast", f"{size_text(best.near_low)} to {size_text(best.near_high)}"),
    )
    lines = [_text(_LEGEND, _LOWER - 12, "by the cost model", "head")]
    for number, (name, value) in enumerate(rows):
        y = _LOWER + 16 + 24 * number
        lines.append(_text(_LEGEND, y, name, "quiet"))
        lines.append(_text(WIDTH - 20, y, value, "end"))
    return lines
