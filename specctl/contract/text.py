"""Text that fits on one line of any terminal, log or annotation."""

from __future__ import annotations


def printable(value: object) -> str:
    """Return the value's text with control characters and half surrogate pairs escaped.

    Names in files are input: a key with a line feed would otherwise break a message in two, and
    half a surrogate pair cannot be written as UTF-8.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
