"""Plots as inline SVG: bars with ranges, stacked bars. No script, no network. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_LABEL, _PLOT, _VALUE, _ROW, _GAP = 210, 460, 170, 20, 6
_COLORS = ("#33628f", "#b5562b", "#5a8f4e", "#7f6aa8", "#8a8a8a")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar.

    Args:
        value: its length.
        low: start of the range that is drawn over it; None draws none.
        high: its end.
        color: index of a color.
        text: what stands behind it.
    """

    label: str
    value: float
    text: str
    color: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One bar of several parts.

    Args:
        parts: (name, length); parts below 0 are drawn with no length.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str


def bars(title: str, items: Sequence[Bar]) -> str:
    """Return a plot of horizontal bars, one under the other."""
    top = max((max(item.value, item.high or 0.0) for item in items), default=0.0)
    rows = []
    for index, item in enumerate(items):
        y, width = _y(index), _scaled(item.value, top)
        rows.append(_text(_LABEL - 8, y, item.label, anchor="end"))
        rows.append(_rect(_LABEL, y, width, item.color, f"{item.label}: {item.text}"))
        end = width
        if item.low is not None and item.high is not None and item.low < item.high:
            low, end = _scaled(item.low, top), max(width, _scaled(item.high, top))
            rows.append(_range(_LABEL + low, _LABEL + _scaled(item.high, top), y))
        rows.append(_text(_LABEL + end + 8, y, item.text))
    return _figure(title, rows, len(items))


def stacks(title: str, items: Sequence[Stack]) -> str:
    """Return a plot of horizontal bars made of parts, with a legend."""
    top = max((sum(max(0.0, size) for _, size in item.parts) for item in items), default=0.0)
    names = list(dict.fromkeys(name for item in items for name, _ in item.parts))
    rows = []
    for index, item in enumerate(items):
        y, x = _y(index), float(_LABEL)
        rows.append(_text(_LABEL - 8, y, item.label, anchor="end"))
        for name, size in item.parts:
            width = _scaled(max(0.0, size), top)
            rows.append(_rect(x, y, width, names.index(name), f"{item.label}, {name}"))
            x += width
        rows.append(_text(x + 8, y, item.text))
    y, x = _y(len(items)), float(_LABEL)
    for index, name in enumerate(names):
        rows.append(_rect(x, y + 5, 10, index, name, height=10))
        rows.append(_text(x + 14, y, name))
        x += 24 + 8 * len(name)
    return _figure(title, rows, len(items) + 1)


def _y(index: int) -> int:
    return 8 + index * (_ROW + _GAP)


def _scaled(value: float, top: float) -> float:
    return round(_PLOT * value / top, 2) if top > 0 else 0.0


def _rect(x: float, y: float, width: float, color: int, title: str, *, height: float = _ROW) -> str:
    fill = _COLORS[color % len(_COLORS)]
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _range(low: float, high: float, y: float) -> str:
    middle = y + _ROW / 2
    ends = "".join(f"M{x:g} {middle - 4:g}v8" for x in (low, high))
    return f'<path d="M{low:g} {middle:g}H{high:g}{ends}" stroke="#111" fill="none"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y + 14:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(title: str, rows: Sequence[str], count: int) -> str:
    width, height = _LABEL + _PLOT + _VALUE, 16 + count * (_ROW + _GAP)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"{''.join(rows)}</svg></figure>"
    )
