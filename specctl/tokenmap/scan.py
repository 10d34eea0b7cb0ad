"""Units of many documents at once, on bytes: the vectorised form of `cuts.split_units`.

Loaded on demand: imports numpy and pyarrow at its top. Invariants: the same units as the twin for
every text (tested); memory is a small multiple of the bytes of one call. A class is one bit of a
byte, so that a rule is a few bitwise operations over arrays that stay in the processor's cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specctl.tokenmap import cuts
from specctl.tokenmap.cuts import BLANKS, LETTER_RANGES, MARK_RANGES, OTHER, Rule, Rules

_BITS = {name: 1 << i for i, name in enumerate("LDPQSNTU")} | {OTHER: 0}
_BLOCK = 1 << 17
_CONTEXT = 5
"""Bytes before and after a place that may decide it: one character and the one before it."""
_SEPARATOR = b"\0"


def _classes_of_bytes() -> bytes:
    ascii_bits = [_BITS[cuts.char_class(code)] for code in range(128)]
    return bytes([*ascii_bits, *([_BITS[cuts.U]] * 128)])


_TABLE = _classes_of_bytes()


@cache
def _plane(rules: Rules) -> bytes:
    """Return for each class byte the right neighbours that the plain rules allow."""
    allowed = [0] * 256
    for rule in rules:
        if rule.before or rule.after:
            continue
        for name in rule.left:
            allowed[_BITS[name]] |= _mask(rule.right)
    return bytes(allowed)


def _mask(names: str) -> int:
    return sum(_BITS[name] for name in names)


def classes(data: bytes) -> np.ndarray:
    """Return the class bit of every byte of a UTF-8 text, [len(data)] uint8.

    All bytes of a character have its class. A character cut off at the end is class `U`.
    """
    found = np.frombuffer(bytearray(data.translate(_TABLE)), np.uint8)
    if not data.isascii():
        raw = np.frombuffer(data, np.uint8)
        _mark_two(found, raw)
        _mark_three(found, raw)
    return found


def _mark_two(found: np.ndarray, raw: np.ndarray) -> None:
    at = np.flatnonzero((raw[:-1] >= 0xC2) & (raw[:-1] < 0xE0))
    code = ((raw[at] & 0x1F).astype(np.int32) << 6) | (raw[at + 1] & 0x3F)
    _mark(found, at, code, 2)


def _mark_three(found: np.ndarray, raw: np.ndarray) -> None:
    at = np.flatnonzero((raw[:-2] & 0xF0) == 0xE0)
    code = (raw[at] & 0x0F).astype(np.int32) << 12
    code |= (raw[at + 1] & 0x3F).astype(np.int32) << 6
    code |= raw[at + 2] & 0x3F
    _mark(found, at, code, 3)


def _mark(found: np.ndarray, at: np.ndarray, code: np.ndarray, width: int) -> None:
    bits = _wide_table()[code]
    for offset in range(width):
        found[at + offset] = bits


@cache
def _wide_table() -> np.ndarray:
    """Return the class bit of each code point below 65,536."""
    table = np.full(1 << 16, _BITS[cuts.U], np.uint8)
    for name, ranges in ((cuts.L, LETTER_RANGES), (cuts.P, MARK_RANGES)):
        for low, high in ranges:
            table[low : high + 1] = _BITS[name]
    table[list(BLANKS)] = 0
    table[0xD800:0xE000] = 0
    return table


def inside_characters(data: bytes) -> np.ndarray | None:
    """Return for every byte whether it goes on a character, [len(data)] bool; None: none does."""
    if data.isascii():
        return None
    inside: np.ndarray = (np.frombuffer(data, np.uint8) & 0xC0) == 0x80
    return inside


def cut_mask(found: np.ndarray, rules: Rules, inside: np.ndarray | None) -> np.ndarray:
    """Return for every byte offset whether a text with these classes may be cut there.

    Args:
        found: `classes` of the text.
        rules: those with `after` name ASCII classes on the right.
        inside: `inside_characters` of the text.

    Returns:
        [len(found) + 1] bool; both ends are False.
    """
    plane = _plane(rules)
    context = [rule for rule in rules if rule.before or rule.after]
    mask = np.zeros(len(found) + 1, bool)
    for start in range(0, len(found), _BLOCK):
        # Some bytes of the blocks before and after are context only.
        low, high = max(start - _CONTEXT, 0), min(start + _BLOCK + _CONTEXT, len(found))
        block = found[low:high]
        wide = None if inside is None else inside[low:high]
        if wide is not None and not wide.any():
            wide = None
        cut = np.zeros(len(block) + 1, bool)
        left = np.frombuffer(block[:-1].tobytes().translate(plane), np.uint8)
        cut[1:-1] = (left & block[1:]) != 0
        before = _before(block, wide)
        for rule in context:
            _add_context(cut, block, before, rule)
        if wide is not None:
            cut[:-1] &= ~wide
        end = min(start + _BLOCK, len(found))
        mask[start:end] = cut[start - low : end - low]
    return mask


def _before(block: np.ndarray, wide: np.ndarray | None) -> np.ndarray:
    """Return for each byte that ends a character the class of the character before it, 0: none."""
    before = np.zeros_like(block)
    before[1:] = block[:-1]
    if wide is None:
        return before
    longer = wide.copy()
    for width in (2, 3, 4):
        # `longer` holds where the character has at least `width` bytes up to here.
        at = np.flatnonzero(longer)
        before[at] = np.where(at >= width, block[np.maximum(at - width, 0)], 0)
        longer[width - 1 :] &= wide[: len(wide) - width + 1]
        longer[: width - 1] = False
    return before


def _add_context(cut: np.ndarray, block: np.ndarray, before: np.ndarray, rule: Rule) -> None:
    """Set `cut[i]` where `rule` holds between `block[i - 1]` and `block[i]`."""
    if len(block) < 2 + bool(rule.after):
        return
    last = len(block) - 1 if rule.after else len(block)
    holds = (block[: last - 1] & _mask(rule.left)) != 0
    holds &= (block[1:last] & _mask(rule.right)) != 0
    if rule.before:
        holds &= (before[: last - 1] & _mask(rule.before)) != 0
    if rule.after:
        holds &= (block[2 : last + 1] & _mask(rule.after)) != 0
    cut[1:last] |= holds


def unit_counts(
    documents: Sequence[bytes], rules: Rules, *, apart: bool
) -> tuple[pa.Table, pa.Table | None]:
    """Return the units of some UTF-8 documents with how often each occurs.

    Args:
        documents: each cut on its own; together at most 1 GiB.
        rules: of the tokenizer.
        apart: whether units that begin a document are counted on their own.

    Returns:
        The units and, with `apart`, those that begin a document: columns `unit` (binary) and `num`
        (int64), in no particular order.
    """
    data = _SEPARATOR.join(documents)
    if not data:
        return empty_table(), empty_table() if apart else None
    mask = cut_mask(classes(data), rules, inside_characters(data))
    ends = np.cumsum([len(document) + 1 for document in documents])
    begins = np.concatenate([[0], ends[:-1]])
    # A separator is a unit of its own: both of its sides are cut.
    mask[ends[:-1] - 1] = mask[begins] = mask[-1] = True
    offsets = np.flatnonzero(mask).astype(np.int32)
    units = pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    if not apart:
        return _counted(units, len(documents) - 1), None
    is_first = np.zeros(len(units), bool)
    has_text = np.array([bool(document) for document in documents])
    is_first[np.searchsorted(offsets, begins[has_text])] = True
    firsts = _counted(units.filter(pa.array(is_first)), 0)
    return _counted(units.filter(pa.array(~is_first)), len(documents) - 1), firsts


def _counted(units: pa.Array, num_separators: int) -> pa.Table:
    counted = units.value_counts()
    names, nums = counted.field(0), counted.field(1)
    if num_separators:
        is_separator = np.array(pc.equal(names, _SEPARATOR))
        nums = pa.array(np.asarray(nums) - is_separator * num_separators)
    table = pa.table({"unit": names, "num": nums})
    return table.filter(pc.greater(nums, 0))


def to_bytes(table: pa.Table) -> tuple[bytes, bytes, bytes]:
    """Return a table as bytes of its units, their offsets (int32) and counts (int64)."""
    if not len(table):
        return b"", b"", b""
    table = table.combine_chunks()
    units = table["unit"].combine_chunks()
    _, ends, data = units.buffers()
    offsets = np.frombuffer(ends, "<i4")[units.offset : units.offset + len(units) + 1]
    joined = memoryview(data)[offsets[0] : offsets[-1]].tobytes()
    nums = np.asarray(table["num"]).astype("<i8").tobytes()
    return joined, (offsets - offsets[0]).tobytes(), nums


def from_bytes(units: bytes, ends: bytes, nums: bytes) -> pa.Table:
    """Return the table that `to_bytes` was given."""
    if not ends:
        return empty_table()
    column = pa.Array.from_buffers(
        pa.binary(), len(nums) // 8, [None, pa.py_buffer(ends), pa.py_buffer(units)]
    )
    return pa.table({"unit": column, "num": pa.array(np.frombuffer(nums, "<i8"))})


def counts_of(per_id: array[int]) -> np.ndarray:
    """Return an array of 64-bit counts as one of numpy, [len(per_id)] uint64, in the same place."""
    return np.frombuffer(per_id, np.uint64)


@contextmanager
def lean_memory() -> Iterator[None]:
    """Let tables come from the system's allocator, which gives memory back when they go.

    The default one of the process keeps it: a tenth more at the peak of a large corpus.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def empty_table() -> pa.Table:
    """Return a table of no units."""
    return pa.table({"unit": pa.array([], pa.binary()), "num": pa.array([], pa.int64())})


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the sum of some tables: every unit once."""
    if not tables:
        return empty_table()
    grouped = pa.concat_tables(tables).group_by("unit", use_threads=False)
    return grouped.aggregate([("num", "sum")]).rename_columns(["unit", "num"])
