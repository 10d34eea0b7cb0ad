"""Split one text into the documents that stand in for it when there is no other text.

A corpus of one text is split into its paragraphs, or its lines when there are few paragraphs, so
that a part of it can be held out.
"""

from __future__ import annotations

import re

_FEW = 20
_PARAGRAPH_END = re.compile(r"(?<=\n)\s*\n")


def paragraphs(text: str) -> list[str]:
    """Split at blank lines, or at line ends when there are fewer than 20 paragraphs.

    The pieces joined again are the text, but for white space only pieces, which are left out.
    """
    pieces: list[str] = []
    start = 0
    for match in _PARAGRAPH_END.finditer(text):
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    if len(pieces) < _FEW:
        pieces = text.splitlines(keepends=True)
    return [piece for piece in pieces if piece.strip()]
