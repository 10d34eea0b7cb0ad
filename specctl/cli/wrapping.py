"""Wrap text for a terminal: whole words, hanging indents, places and shapes never broken."""

from __future__ import annotations

import re
import textwrap

USUAL_WIDTH = 100
_SHAPE = re.compile(r"\[[^][]{1,40}\]")
_FIXED_SPACE = "\u00a0"  # textwrap breaks at ASCII spaces only


def wrapped(text: str, width: int | None, *, first: str = "", rest: str = "") -> list[str]:
    """Return the lines of `text`.

    Args:
        text: one paragraph.
        width: columns; None leaves it on one line.
        first: what the first line begins with.
        rest: what the other lines begin with.
    """
    if width is None or len(first) + len(text) <= width:
        return [f"{first}{text}".rstrip()]
    kept = _SHAPE.sub(lambda match: match.group().replace(" ", _FIXED_SPACE), text)
    lines = textwrap.wrap(
        kept,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIXED_SPACE, " ") for line in lines]
