"""Where a text may be cut so that the tokens of the parts are the tokens of the whole.

A *unit* is the text between two such places. Each rule looks at the classes of at most four
neighbouring characters, and a text is cut only where both sides are known characters: everything
whose class depends on a Unicode version (most marks, digits and blanks beyond ASCII) is class `-`
or `U` and keeps its neighbours together. Which rules hold for a tokenizer is decided in
`structure`; `scan` applies them to bytes, `split_units` here is the readable twin on characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

L, D, P, Q, S, N, T, U = "LDPQSNTU"
"""Letter, ASCII digit, punctuation, apostrophe, space, line end, tab, other character."""
OTHER = "-"
"""A control character or a blank beyond ASCII; no rule names it."""
BLANKS = (0x85, 0xA0, 0x1680, 0x180E, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F)
BLANKS += (0x2060, 0x2581, 0x3000, 0xFEFF)
"""White space in some Unicode version, invisible, or the space sign of SentencePiece."""
LETTER_RANGES = (
    (0xC0, 0xD6),
    (0xD8, 0xF6),
    (0xF8, 0x1BA),
    (0x400, 0x481),
    (0x3041, 0x3096),
    (0x30A1, 0x30FA),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
)
"""Inclusive ranges that have been letters, and no marks, since Unicode 3.0."""
MARK_RANGES = (
    (0x3001, 0x3002),
    (0x300C, 0x300F),
    (0xFF01, 0xFF01),
    (0xFF08, 0xFF09),
    (0xFF0C, 0xFF0C),
    (0xFF1A, 0xFF1B),
)
"""Inclusive ranges that have been punctuation since Unicode 3.0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Cut between `left` and `right` when the characters around them fit too.

    Args:
        left: classes of the character before the cut.
        right: classes of the character after it.
        before: classes of the character before `left`; empty: any, or none.
        after: classes of the character after `right`; empty: any, or none.
    """

    left: str
    right: str
    before: str = ""
    after: str = ""


Rules = tuple[Rule, ...]

_LETTER_ENDS = (
    Rule(left=L, right=D + P + Q + S + N + T),
    Rule(left=D, right=L + P + Q + S + N + T),
)
GPT2: Rules = (
    *_LETTER_ENDS,
    Rule(left=P, right=L + D + S + N + T),
    Rule(left=Q, right=S + N + T),
    Rule(left=U, right=S),
    # The last blank of a run before a word stands alone or joins the word.
    Rule(left=S + N + T, right=S, after=L + P + Q),
    Rule(before=L + D + P + Q, left=N + T, right=L + D + P + Q),
)
"""` ?letters`, ` ?digits`, ` ?other`, blanks up to the last one, contractions."""
CL100K: Rules = (
    *_LETTER_ENDS,
    Rule(left=P, right=D + S + T),
    Rule(left=Q, right=D + S + T),
    Rule(left=U, right=S),
    Rule(before=P + S, left=P + Q, right=L),
    Rule(left=S + N + T, right=S, after=L + P + Q),
    Rule(left=N, right=L + D + P + Q),
)
"""As above, but one sign or blank joins the letters after it and line ends join what is before."""
O200K: Rules = (
    Rule(left=L, right=D + P + S + N + T),
    Rule(left=D, right=L + P + Q + S + N + T),
    Rule(left=P, right=D + S + T),
    Rule(left=U, right=S),
    Rule(left=S + N + T, right=S, after=L + P + Q),
    Rule(left=N, right=L + D),
)
"""As above; contractions belong to the word and `/` joins line ends."""
EACH_DIGIT: Rules = (Rule(left=D, right=D),)
SPACED: Rules = (Rule(left=L + D + P + Q + N + T + U, right=S),)
"""Pieces begin at a space and no token reaches across it."""
SPACED_ASCII: Rules = (Rule(left=L + D + P + Q, right=S),)
BERT: Rules = (
    Rule(left=L + D + P + Q, right=S + N + T),
    Rule(left=L + D, right=P + Q),
    Rule(left=P + Q, right=L + D + P + Q),
    Rule(left=S + N + T, right=L + D + P + Q),
    Rule(left=U, right=S),
)
PIECE_CUT: Rules = (Rule(before=L, left=L, right=S, after=L),)
"""Where a long document may be cut, whatever follows: inside no added token and no blank run."""


def char_class(code: int) -> str:
    """Return the class of one code point."""
    if code < 128:
        return _ascii_class(code)
    if code in BLANKS or 0xD800 <= code < 0xE000:
        return OTHER
    if any(low <= code <= high for low, high in LETTER_RANGES):
        return L
    return P if any(low <= code <= high for low, high in MARK_RANGES) else U


def _ascii_class(code: int) -> str:
    char = chr(code)
    if char.isalpha():
        return L
    if char.isdigit():
        return D
    if 33 <= code < 127:
        return Q if char == "'" else P
    return {" ": S, "\n": N, "\r": N, "\t": T}.get(char, OTHER)


class _Classes(dict[int, str]):
    """Code point -> class, filled as characters are met; for `str.translate`."""

    def __missing__(self, code: int) -> str:
        self[code] = char_class(code)
        return self[code]


_CLASSES = _Classes()


@cache
def _pattern(rules: Rules) -> re.Pattern[str]:
    parts = []
    for rule in rules:
        back = f"[{rule.before}][{rule.left}]" if rule.before else f"[{rule.left}]"
        ahead = f"[{rule.right}]" + (f"[{rule.after}]" if rule.after else "")
        parts.append(f"(?<={back})(?={ahead})")
    return re.compile("|".join(parts))


def cut_places(text: str, rules: Rules) -> list[int]:
    """Return the character offsets at which `text` may be cut, ascending, ends left out."""
    classes = text.translate(_CLASSES)
    return [match.start() for match in _pattern(rules).finditer(classes)]


def split_units(text: str, rules: Rules) -> list[str]:
    """Return the units of one text; joined they are the text."""
    if not text:
        return []
    places = [0, *cut_places(text, rules), len(text)]
    return [text[a:b] for a, b in pairwise(places)]
