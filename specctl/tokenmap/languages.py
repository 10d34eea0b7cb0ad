"""Name the language of a document for the coverage report: code by suffix, text by script."""

from __future__ import annotations

import re

from specctl.tokenmap.sources import CODE_SUFFIXES

_SAMPLE_BYTES = 8192
_SCRIPTS = (
    ("japanese", re.compile("[\u3040-\u30ff]")),
    ("korean", re.compile("[\uac00-\ud7af\u1100-\u11ff]")),
    ("chinese", re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")),
    ("cyrillic", re.compile("[\u0400-\u052f]")),
    ("greek", re.compile("[\u0370-\u03ff]")),
    ("arabic", re.compile("[\u0600-\u06ff]")),
    ("hebrew", re.compile("[\u0590-\u05ff]")),
    ("devanagari", re.compile("[\u0900-\u097f]")),
    ("thai", re.compile("[\u0e00-\u0e7f]")),
)
_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")


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
    text = sample.decode("utf-8", "ignore")
    counts = {name: len(pattern.findall(text)) for name, pattern in _SCRIPTS}
    if counts["japanese"] * 10 > counts["chinese"]:
        counts["japanese"] += counts.pop("chinese")
    best = max(counts, key=lambda name: counts[name])
    # One ideograph says about as much as three letters.
    num_latin = len(_LATIN.findall(text)) // (3 if best in ("chinese", "japanese") else 1)
    return best if counts[best] > num_latin else "latin"
