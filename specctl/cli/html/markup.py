"""Pieces of HTML in which every text from a file is escaped, and in no other way.

Invariants: functions that take plain text escape it; those that take markup say so. Control
characters are shown as escapes, since HTML has no way to hold them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from specctl.contract.text import printable

_CODE = re.compile(r"`([^`]*)`")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def escaped(value: object) -> str:
    """Return any value as text that may stand between tags and in quoted attributes."""
    return html.escape(printable(value), quote=True)


def prose(text: str) -> str:
    """Return a sentence as markup; what stands in backticks becomes code."""
    return _CODE.sub(r"<code>\1</code>", escaped(text))


def code(value: object) -> str:
    """Return a name or value as markup."""
    return f"<code>{escaped(value)}</code>"


def section(title: str, body: str) -> str:
    """Return a section with a heading.

    Args:
        title: plain text.
        body: markup; an empty one gives no section at all.
    """
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}\n</section>\n" if body else ""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, is_prose: bool = False
) -> str:
    """Return a table whose first column names the rows.

    Args:
        head: plain text, one for each column; one that ends in `#` holds numbers.
        rows: markup, one for each column.
        caption: plain text for those who do not see the table's surroundings.
        is_prose: cells hold sentences and wrap.
    """
    kinds = [' class="number"' if name.endswith("#") else "" for name in head]
    names = [
        f'<th scope="col"{kind}>{escaped(name.rstrip(" #"))}</th>'
        for name, kind in zip(head, kinds, strict=True)
    ]
    lines = [_row(row, kinds) for row in rows]
    style = "scroll prose" if is_prose else "scroll"
    return (
        f'<div class="{style}" tabindex="0" role="region" aria-label="{escaped(caption)}">'
        f"<table>\n<caption>{escaped(caption)}</caption>\n"
        f"<thead><tr>{''.join(names)}</tr></thead>\n"
        f"<tbody>\n{''.join(lines)}</tbody>\n</table></div>"
    )


def _row(row: Sequence[str], kinds: Sequence[str]) -> str:
    cells = [f"<td{kind}>{cell}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True)]
    return f'<tr><th scope="row">{row[0]}</th>{"".join(cells)}</tr>\n'


def bytes_text(count: int) -> str:
    """Return a number of bytes with a unit, three digits or fewer before the point."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,} bytes"
