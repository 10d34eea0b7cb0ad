"""Byte counts as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


def parse_size(text: str) -> int:
    """Return the bytes of `5GB`, `512 MiB` or a plain number.

    Raises:
        ValueError: it is none of these, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"`{text}` is no size such as 5GB or 512MiB")
    size = int(float(found[1]) * unit)
    if size < 1:
        raise ValueError(f"`{text}` is less than one byte")
    return size
