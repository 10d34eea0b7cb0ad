"""The fast reader of a safetensors header: its table when nothing is wrong with it, else nothing.

Invariants: what it accepts, the slow reader of `safetensors_header` accepts without a finding and
with the same entries (a property test holds them equal). It needs less than four times the header's
size beyond the entries, so that the format's largest header stays affordable.
"""

from __future__ import annotations

import re
from math import prod
from typing import Annotated

import msgspec

from specctl.checkpoint.json_text import num_quotes
from specctl.checkpoint.tensor_entry import DTYPE_BITS, TensorEntry

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_QUOTES_OF_ENTRY = 10
"""The entry's key, `dtype`, its value, `shape` and `data_offsets`: five strings."""
# The product of a long list of large numbers grows without end.
_Shape = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Size, _Size]


_TABLE = msgspec.json.Decoder(dict[str, _Stored])
_RAW_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Stored)
_METADATA = msgspec.json.Decoder(dict[str, str])
_OPENING = re.compile(rb'\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*(?=\{)')
_CLOSING = re.compile(rb"[ \t\r\n]*([,}])")
# One text for each dtype: a decoder makes a new one for every entry.
_DTYPES = {dtype: (dtype, bits) for dtype, bits in DTYPE_BITS.items()}


def read_table(raw: bytes, *, file: str, base: int) -> list[TensorEntry] | None:
    """Return the entries in header order, or None when a defect has to be looked for.

    Args:
        raw: the header's JSON text.
        file: name for the entries.
        base: offset of the data section in the file.
    """
    try:
        table = _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if table is None or "__metadata__" in table:
        return None
    entries: list[TensorEntry] = []
    append, dtype_of, size_of = entries.append, _DTYPES.get, prod  # looked up once, not per tensor
    for key, stored in table.items():
        known = dtype_of(stored.dtype)
        shape = stored.shape
        begin, end = stored.data_offsets
        if known is None or size_of(shape) * known[1] != (end - begin) * 8:
            return None
        append(
            TensorEntry(
                key=key,
                file=file,
                dtype=known[0],
                shape=shape,
                begin=base + begin,
                end=base + end,
            )
        )
    return entries


def _decode(raw: bytes) -> dict[str, _Stored] | None:
    """Return the tensors' table; a key that is there twice shows in the number of quotes."""
    body = _without_metadata(raw)
    if body is not None:
        table = _TABLE.decode(body)
        is_whole = num_quotes(body) == _QUOTES_OF_ENTRY * len(table)
        return table if is_whole and (table or body is raw or _is_empty(raw)) else None
    parts = _RAW_TABLE.decode(raw)
    quotes = 0
    metadata = parts.pop("__metadata__", None)
    if metadata is not None:
        quotes = 2 + 4 * len(_METADATA.decode(metadata))
    table = {key: _ENTRY.decode(part) for key, part in parts.items()}
    return table if num_quotes(raw) == quotes + _QUOTES_OF_ENTRY * len(table) else None


def _without_metadata(raw: bytes) -> bytes | None:
    """Return the header without a plain `__metadata__` at its beginning, None for another one."""
    opening = _OPENING.match(raw)
    if opening is None:
        return None if b"__metadata__" in raw else raw
    begin = opening.end()
    end = raw.find(b"}", begin) + 1
    text = raw[begin:end]
    closing = _CLOSING.match(raw, end)
    if closing is None or b"{" in text[1:] or b"\\" in text:
        return None
    try:
        metadata = _METADATA.decode(text)
    except msgspec.DecodeError:  # a brace inside a text
        return None
    if num_quotes(text) != 4 * len(metadata):
        return None
    return b"{" + raw[closing.end() if closing[1] == b"," else closing.start(1) :]


def _is_empty(raw: bytes) -> bool:
    """Tell whether a header without tensors is JSON: a comma may have been cut off with it."""
    try:
        return len(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])) == 1
    except msgspec.DecodeError:
        return False
