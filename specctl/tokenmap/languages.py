"""Name the language of a document for the coverage report: code by suffix, text by script."""

from __future__ import annotations

from collections import Counter
from functools import cache

from specctl.tokenmap.sources import CODE_SUFFIXES

_SAMPLE_BYTES = 8192
_SCRIPTS = (
    ("japanese", 0x3040, 0x30FF),
    ("korean", 0xAC00, 0xD7AF),
    ("korean", 0x1100, 0x11FF),
    ("chinese", 0x3400, 0x4DBF),
    ("chinese", 0x4E00, 0x9FFF),
    ("cyrillic", 0x0400, 0x052F),
    ("greek", 0x0370, 0x03FF),
    ("arabic", 0x0600, 0x06FF),
    ("hebrew", 0x0590, 0x05FF),
    ("devanagari", 0x0900, 0x097F),
    ("thai", 0x0E00, 0x0E7F),
    ("latin", 0x00C0, 0x024F),
)
_NAMES = tuple(dict.fromkeys(name for name, _, _ in _SCRIPTS if name != "latin"))
_ASCII = bytes(range(128))
_ASCII_LETTERS = bytes(code for code in range(128) if chr(code).isalpha())


@cache
def _script_of(char: str) -> str | None:
    code = ord(char)
    return next((name for name, low, high in _SCRIPTS if low <= code <= high), None)


def language_of(suffix: str, data: bytes) -> str:
    """Return `code:<suffix>`, or the script most letters of the first 8 KiB belong to.

    Args:
        suffix: of the file, with its dot; empty: text.
        data: UTF-8, may end inside a character.
    """
    if suffix in CODE_SUFFIXES:
        return f"code:{suffix[1:]}"
    sample = data[:_SAMPLE_BYTES]
    if sample.isascii():
        return "latin"
    found: Counter[str | None] = Counter()
    for char, num in Counter(sample.translate(None, _ASCII).decode("utf-8", "ignore")).items():
        found[_script_of(char)] += num
    counts = {name: found[name] for name in _NAMES}
    if counts["japanese"] * 10 > counts["chinese"]:
        counts["japanese"] += counts.pop("chinese")
    best = max(counts, key=lambda name: counts[name])
    # One ideograph says about as much as three letters.
    num_latin = found["latin"] + len(sample) - len(sample.translate(None, _ASCII_LETTERS))
    num_latin //= 3 if best in ("chinese", "japanese") else 1
    return best if counts[best] > num_latin else "latin"
