"""Encode distinct units once and multiply: from units and their counts to target-id counts.

Loaded on demand: imports numpy and pyarrow at its top. Invariants: integer arithmetic only, so sums
do not depend on the order of units; memory is bounded by the units of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specctl.tokenmap.byte_pairs import MAX_WORD_BYTES, MergeTable, merge_table, merged_words
from specctl.tokenmap.cuts import LETTER_RANGES
from specctl.tokenmap.structure import SEPARATOR, FastPlan, letters_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNITS_A_TEXT = 512
_TEXTS_A_BATCH = 16  # the package makes some 100 bytes for each token of a batch
_WHOLE_A_BATCH = 64
_UNITS_A_SUM = 1 << 17
_LENGTHS = (0, 5, 6, 7, 8, 9, 10, 12, 14, 18, 26, 1 << 31)
"""Units of like length are encoded together, a tenth at a time: what bounds memory."""
_WIDE = "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in LETTER_RANGES)
_ONE_WORD = f"^ ?(?:[A-Za-z{_WIDE}]+|[!-&(-/:-@\\[-`{{-~]+)$"
"""Letters, or signs of ASCII but the apostrophe: what every listed pattern takes whole and NFC
leaves as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEncoder:
    """The tokenizers that encode units of a plan.

    Args:
        first: the tokenizer as published, for what begins a document.
        inner: for every other unit.
        letters: for units of one pre-token where `merges` is None; None: `inner`.
        merges: of the model, for most units of one pre-token.
    """

    first: Tokenizer
    inner: Tokenizer
    letters: Tokenizer | None
    merges: MergeTable | None

    @staticmethod
    def of(plan: FastPlan, first: Tokenizer) -> UnitEncoder:
        """Build the tokenizers of a plan."""
        merges = merge_table(plan.inner) if plan.has_letters else None
        letters = None
        if plan.has_letters and merges is None:  # the model has a rule that the table has not
            letters = _separated(letters_of(plan.inner))
        inner = _separated(plan.inner)
        return UnitEncoder(first=first, inner=inner, letters=letters, merges=merges)


def _separated(config: bytes) -> Tokenizer:
    """Return a tokenizer that keeps the units of a joined text apart."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_buffer(config)
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, normalized=False)])
    return tokenizer


def encode_units(
    tables: Mapping[int, pa.Table], encoder: UnitEncoder, counts: Mapping[int, np.ndarray]
) -> Counted:
    """Add the target-id counts of each group's units.

    Args:
        tables: group -> its units and their counts, as `scan.unit_counts` gives them.
        encoder: of the tokenizer.
        counts: group -> [size] uint64 occurrences, added to.
    """
    num_units = occurrences = 0
    for low, high in pairwise(_LENGTHS):
        part = {group: _of_length(tables[group], low, high) for group in sorted(tables)}
        part = {group: table for group, table in part.items() if len(table)}
        if part:
            counted = _encode_units(part, encoder, counts)
            num_units += counted.num_units
            occurrences += counted.num_occurrences
    return Counted(num_units=num_units, num_occurrences=occurrences)


def _of_length(table: pa.Table, low: int, high: int) -> pa.Table:
    """Return the units of low < bytes <= high."""
    sizes = pc.binary_length(table["unit"])
    return table.filter(pc.and_(pc.greater(sizes, low), pc.less_equal(sizes, high)))


def _encode_units(
    tables: Mapping[int, pa.Table], encoder: UnitEncoder, counts: Mapping[int, np.ndarray]
) -> Counted:
    """Encode the units of some groups, each unit once."""
    groups = list(tables)
    column = pa.concat_tables([tables[group] for group in groups])["unit"]
    coded = column.combine_chunks().dictionary_encode()
    del column
    rows = np.asarray(coded.indices)
    flat, starts, lengths = _flat_ids(coded.dictionary, encoder)
    begin = occurrences = 0
    for group in groups:
        end = begin + len(tables[group])
        nums = np.asarray(tables[group]["num"].combine_chunks()).astype(np.uint64)
        units = rows[begin:end]
        _add_weighted(counts[group], flat, starts[units], lengths[units], nums)
        occurrences += int(nums.sum())
        begin = end
    return Counted(num_units=len(starts), num_occurrences=occurrences)


def encode_firsts(
    tables: Mapping[int, pa.Table], encoder: UnitEncoder, counts: Mapping[int, np.ndarray]
) -> Counted:
    """Add the counts of units that begin a document, as `encode_units` does for the others."""
    num_units = occurrences = 0
    for group, table in tables.items():
        for start in range(0, len(table), _UNITS_A_TEXT):
            part = table.slice(start, _UNITS_A_TEXT)
            texts = part["unit"].cast(pa.string()).to_pylist()
            nums = part["num"].to_pylist()
            encode_whole(texts, nums, encoder.first, counts[group])
            occurrences += sum(nums)
        num_units += len(table)
    return Counted(num_units=num_units, num_occurrences=occurrences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What was encoded.

    Args:
        num_units: distinct units that were encoded.
        num_occurrences: how often they occur.
    """

    num_units: int
    num_occurrences: int


def _add_weighted(
    counts: np.ndarray,
    flat: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    nums: np.ndarray,
) -> None:
    """Add how often each id occurs; unit i is `flat[starts[i]:][:lengths[i]]`, nums[i] times."""
    for begin in range(0, len(starts), _UNITS_A_SUM):
        part = slice(begin, begin + _UNITS_A_SUM)
        first, many = starts[part], lengths[part]
        ends = np.cumsum(many)
        at = np.arange(int(ends[-1])) + np.repeat(first - (ends - many), many)
        _add_at(counts, flat[at], np.repeat(nums[part], many))


def _add_at(counts: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
    """Add `weights[i]` to `counts[ids[i]]`, exactly."""
    # bincount adds doubles: the three parts of a weight keep every sum exact.
    for shift in (0, 24, 48):
        part = (weights >> np.uint64(shift)) & np.uint64(0xFFFFFF)
        if shift and not part.any():
            continue
        summed = np.bincount(ids, weights=part.astype(np.float64), minlength=len(counts))
        counts += summed.astype(np.uint64) << np.uint64(shift)


def _flat_ids(units: pa.Array, encoder: UnitEncoder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all units' ids one after another, and where each unit's ids begin and how many."""
    lengths = np.zeros(len(units), np.int64)
    starts = np.zeros(len(units), np.int64)
    texts = units.cast(pa.string())
    is_word = np.zeros(len(units), bool)
    if encoder.letters is not None or encoder.merges is not None:
        is_word = np.asarray(pc.match_substring_regex(texts, _ONE_WORD))
    parts, total = [], 0
    if encoder.merges is not None:
        at, ids, many = _merged_units(units, is_word, encoder.merges)
        is_word[:] = False
        lengths[at], starts[at] = many, np.cumsum(many) - many
        parts, total = [ids], len(ids)
    is_left = lengths == 0
    for tokenizer, chosen in ((encoder.letters, is_word), (encoder.inner, ~is_word & is_left)):
        places = np.flatnonzero(chosen)
        if tokenizer is None or not len(places):
            continue
        for begin, words, ids in _encoded(texts.take(pa.array(places)), tokenizer):
            at = places[begin : begin + len(words)]
            lengths[at] = words
            starts[at] = total + np.cumsum(words) - words
            parts.append(ids)
            total += len(ids)
    return (np.concatenate(parts) if parts else np.empty(0, np.int32)), starts, lengths


def _merged_units(
    units: pa.Array, is_word: np.ndarray, merges: MergeTable
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the places of the words that `merges` takes, their ids, and how many each has."""
    _, ends, data = units.buffers()
    offsets = np.frombuffer(ends, np.int32)[units.offset : units.offset + len(units) + 1]
    raw = np.frombuffer(data, np.uint8)
    sizes = np.diff(offsets)
    is_taken = is_word & (sizes <= MAX_WORD_BYTES)
    unknown = np.flatnonzero((merges.byte_ids < 0)[raw[offsets[0] : offsets[-1]]]) + offsets[0]
    is_taken[np.searchsorted(offsets, unknown, "right") - 1] = False
    places = np.flatnonzero(is_taken)
    places = places[np.argsort(sizes[places], kind="stable")]
    ids, many = merged_words(raw, offsets[places], sizes[places], merges)
    return places, ids, many


def _encoded(texts: pa.Array, tokenizer: Tokenizer) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (index of the first unit, ids of each unit as number, all their ids)."""
    encode = fast_encode(tokenizer)
    separator = tokenizer.token_to_id(SEPARATOR)
    step = _UNITS_A_TEXT * _TEXTS_A_BATCH
    for begin in range(0, len(texts), step):
        batch = texts[begin : begin + step].to_pylist()
        joined = [
            SEPARATOR.join([*batch[i : i + _UNITS_A_TEXT], ""])
            for i in range(0, len(batch), _UNITS_A_TEXT)
        ]
        first = begin
        for encoding in encode(joined, add_special_tokens=False):
            ids = np.array(encoding.ids, np.int32)
            ends = np.flatnonzero(ids == separator)
            yield first, np.diff(ends, prepend=-1) - 1, np.delete(ids, ends)
            first += len(ends)


def fast_encode(tokenizer: Tokenizer):  # type: ignore[no-untyped-def]
    """Return the batch encoder that skips character offsets; packages before 0.20 lack it."""
    return getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)


def encode_whole(
    texts: Sequence[str], nums: Sequence[int], tokenizer: Tokenizer, counts: np.ndarray
) -> None:
    """Add the counts of texts that are encoded as they are, text i counting `nums[i]` times."""
    encode = fast_encode(tokenizer)
    for begin in range(0, len(texts), _WHOLE_A_BATCH):
        part = slice(begin, begin + _WHOLE_A_BATCH)
        encodings = encode(list(texts[part]), add_special_tokens=False)
        for num, encoding in zip(nums[part], encodings, strict=True):
            found = np.bincount(np.array(encoding.ids, np.int64), minlength=len(counts))
            counts += found.astype(np.uint64) * np.uint64(num)
