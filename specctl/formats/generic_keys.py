"""Keys with their indexes left out, for a hundred thousand keys at once."""

from __future__ import annotations

import re
from collections.abc import Sequence

# No model has a hundred thousand layers or experts; a longer number is a part of the name, so that
# no reader makes a list, or a number of five thousand digits, of what a key says.
INDEX = re.compile(r"(?<![^.])\d{1,5}(?=\.|$)")
_INDEX_OF_LINES = re.compile(r"\.\d{1,5}(?=[.\n])")


def generic_key(key: str) -> str:
    """Return the key with every numeric part of at most five digits written `{i}`."""
    return INDEX.sub("{i}", key)


def generic_forms(keys: Sequence[str]) -> list[str]:
    """Return `generic_key` of each key.

    All keys are one text for one substitution: a call for each would cost more than reading their
    headers.
    """
    text = "\n." + "\n.".join(keys) + "\n"
    if text.count("\n") != len(keys) + 1 or not keys:  # a line feed in a key
        return [generic_key(key) for key in keys]
    return _INDEX_OF_LINES.sub(".{i}", text)[2:-1].split("\n.")
