"""Keys with their indexes left out, and keys of a pattern, for a million keys at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

# No model has a hundred thousand layers or experts; a longer number is a part of the name, so that
# no reader makes a list, or a number of five thousand digits, of what a key says.
INDEX = re.compile(r"(?<![^.])\d{1,5}(?=\.|$)")
_INDEX_OF_LINES = re.compile(r"\.\d{1,5}(?=[.\n])")
_MASK = str.maketrans("123456789", "0" * 9)
_NUM_AT_ONCE = 1000


def generic_key(key: str) -> str:
    """Return the key with every numeric part of at most five digits written `{i}`."""
    return INDEX.sub("{i}", key)


def generic_forms(keys: Sequence[str]) -> list[str]:
    """Return `generic_key` of each key.

    A call for each would cost more than reading their headers. Of a hundred thousand keys only some
    dozens differ in more than the digits, and a key whose digits are all indexes has the same form
    as its mask, which is the key with every digit written 0.
    """
    forms: list[str] = []
    for begin in range(0, len(keys), _NUM_AT_ONCE):
        forms += _forms_of_some(keys[begin : begin + _NUM_AT_ONCE])
    return forms


def matching(pattern: str, names: Collection[str]) -> Iterator[str]:
    """Yield the names that a pattern matches as a whole, in their order.

    Args:
        pattern: regular expression without a class that takes line feeds.
        names: all are one text for one search, a fifth of the time of a call for each.
    """
    text = "\n".join(names)
    if text.count("\n") >= max(len(names), 1):  # a line feed in a name
        yield from filter(re.compile(pattern).fullmatch, names)
        return
    for found in re.finditer(f"^(?:{pattern})$", text, re.MULTILINE) if names else ():
        yield found[0]


def _forms_of_some(keys: Sequence[str]) -> list[str]:
    masks = "\n".join(keys).translate(_MASK).split("\n")
    if len(masks) != len(keys):  # a line feed in a key
        return [generic_key(key) for key in keys]
    distinct = set(masks)
    if len(distinct) > len(keys) // 4:
        return _forms_of_text(keys)
    form_of = {mask: generic_key(mask) for mask in distinct}
    forms = [form_of[mask] for mask in masks]
    if any("0" in form for form in form_of.values()):
        named = [place for place, form in enumerate(forms) if "0" in form]
        for place, form in zip(named, _forms_of_text([keys[i] for i in named]), strict=True):
            forms[place] = form
    return forms


def _forms_of_text(keys: Sequence[str]) -> list[str]:
    """Return the forms of keys without a line feed; all are one text for one substitution."""
    text = "\n." + "\n.".join(keys) + "\n"
    return _INDEX_OF_LINES.sub(".{i}", text)[2:-1].split("\n.")
