"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return lines + [f"| {' | '.join(cell(text) for text in row)} |" for row in rows]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
