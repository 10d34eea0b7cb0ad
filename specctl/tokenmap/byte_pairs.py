"""Byte-pair merges of many words at once: the vectorised twin of the package's BPE model.

Loaded on demand: imports numpy at its top. Invariants: in each round every word makes the one merge
of lowest rank, the leftmost of equals, which is the order of the model, so the ids are the model's
(tested); words of one call are laid out position by position, so that a round is a few operations
over all of them; memory is bounded by `_WIDTH` words.
*Source:* the merge order of Hugging Face `tokenizers`' BPE model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_WORD_BYTES = 96
_POSITION_BITS = 7
_NO_MERGE = np.int32(2**31 - 1)
_COLUMN_BITS = 13
_WIDTH = 1 << _COLUMN_BITS
_ID_BITS = 20
_SLOTS_A_PAIR = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NO_PAIR = np.uint64(2**64 - 1)
_DEAD = np.int32(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeTable:
    """The merges of one model, ready for look-up.

    Args:
        byte_ids: [256] int32, target id of each byte, -1: not in the vocabulary.
        of_bytes: [65536] int32, rank of the merge of two bytes.
        results: [merges] int32, target id that each merge gives.
        slots: [2^n] uint64, pairs `left << 20 | right` by open addressing.
        ranks: [2^n] int32, rank of the pair in each slot.
        no_id: one id above all of the model.
    """

    byte_ids: np.ndarray
    of_bytes: np.ndarray
    results: np.ndarray
    slots: np.ndarray
    ranks: np.ndarray
    no_id: int

    def ranks_of(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the rank of each pair's merge, `_NO_MERGE` where there is none; int32."""
        pairs = (left.astype(np.uint64) << np.uint64(_ID_BITS)) | right.astype(np.uint64)
        places = _slots_of(pairs, len(self.slots))
        found = self.slots[places]
        is_pair = found == pairs
        ranks: np.ndarray = np.where(is_pair, self.ranks[places], _NO_MERGE)
        open_ = np.flatnonzero(~is_pair & (found != _NO_PAIR))
        while len(open_):
            places[open_] = (places[open_] + np.uint64(1)) & np.uint64(len(self.slots) - 1)
            found = self.slots[places[open_]]
            is_pair = found == pairs[open_]
            ranks[open_[is_pair]] = self.ranks[places[open_[is_pair]]]
            open_ = open_[~is_pair & (found != _NO_PAIR)]
        return ranks


def _slots_of(pairs: np.ndarray, num_slots: int) -> np.ndarray:
    """Return the first place to look for each pair; `num_slots` is a power of two."""
    places: np.ndarray = (pairs * _FACTOR) >> np.uint64(65 - num_slots.bit_length())
    return places


def byte_chars() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [code for code in range(256) if code not in set(printable)]
    chars = {code: chr(code) for code in printable}
    chars |= {code: chr(256 + place) for place, code in enumerate(others)}
    return [chars[code] for code in range(256)]


def merge_table(tokenizer: str | bytes) -> MergeTable | None:
    """Return the merges of a byte-level BPE tokenizer.json; None when a rule here does not hold."""
    model: dict[str, Any] = json.loads(tokenizer)["model"]
    vocab: dict[str, int] = model["vocab"]
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if any(model.get(name) for name in options):
        return None
    merges = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]
    no_id = max(vocab.values()) + 1
    if len(set(merges)) != len(merges) or max(no_id, 2 * len(merges)) >= 1 << _ID_BITS:
        return None
    left = np.array([vocab[a] for a, _ in merges], np.uint64)
    right = np.array([vocab[b] for _, b in merges], np.uint64)
    num_slots = 1 << max((_SLOTS_A_PAIR * len(merges)).bit_length(), 4)
    slots = np.full(num_slots, _NO_PAIR)
    ranks = np.full(num_slots, _NO_MERGE)
    pairs = (left << np.uint64(_ID_BITS)) | right
    _fill(slots, ranks, pairs)
    table = MergeTable(
        byte_ids=np.array([vocab.get(char, _DEAD) for char in byte_chars()], np.int32),
        of_bytes=np.empty(0, np.int32),
        results=np.array([vocab[a + b] for a, b in merges], np.int32),
        slots=slots,
        ranks=ranks,
        no_id=no_id,
    )
    known = np.where(table.byte_ids == _DEAD, no_id, table.byte_ids)
    first, second = np.repeat(known, 256), np.tile(known, 256)
    return MergeTable(
        byte_ids=table.byte_ids,
        of_bytes=table.ranks_of(first, second),
        results=table.results,
        slots=slots,
        ranks=ranks,
        no_id=no_id,
    )


def _fill(slots: np.ndarray, ranks: np.ndarray, pairs: np.ndarray) -> None:
    """Put every pair into the first free slot at or after its own."""
    waiting = np.arange(len(pairs))
    places = _slots_of(pairs, len(slots))
    while len(waiting):
        at = places[waiting]
        is_free = slots[at] == _NO_PAIR
        slots[at[is_free]] = pairs[waiting[is_free]]
        is_in = slots[at] == pairs[waiting]  # of several for one slot the last one stays
        ranks[at[is_in]] = waiting[is_in]
        waiting = waiting[~is_in]
        places[waiting] = (places[waiting] + np.uint64(1)) & np.uint64(len(slots) - 1)


def merged_words(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, table: MergeTable
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of some words one after another, and how many each word has.

    Args:
        data: [bytes] uint8 that the words lie in.
        starts: [words] offset of each.
        lengths: [words] bytes of each, 1 to `MAX_WORD_BYTES`, all in the vocabulary; ascending
            is fastest.
        table: of the model.

    Returns:
        [ids] int32 and [words] int64, in the order of the words.
    """
    flat, nums = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    for begin in range(0, len(starts), _WIDTH):
        part = slice(begin, begin + _WIDTH)
        symbols = _merged(data, starts[part], lengths[part], table).T
        is_alive = symbols != _DEAD
        flat.append(symbols[is_alive])
        nums.append(is_alive.sum(axis=1))
    return np.concatenate(flat), np.concatenate(nums)


def _merged(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, table: MergeTable
) -> np.ndarray:
    """Return [positions, words] int32: the ids of each word where they begin, `_DEAD` elsewhere."""
    height, width = int(lengths.max()), len(starts)
    rows = np.arange(height, dtype=np.int32)[:, None]
    is_inside = rows < lengths
    raw = data[np.where(is_inside, starts + rows, starts)]
    # Two rows below the words: what follows a last symbol and what precedes a first one.
    symbols = np.full((height + 2, _WIDTH), table.no_id, np.int32)
    symbols[:height, :width] = np.where(is_inside, table.byte_ids[raw], _DEAD)
    # Keys order merges by rank, then from left to right.
    keys = np.full((height + 2, width), _NO_MERGE)
    pairs = (raw[:-1].astype(np.int32) << 8) | raw[1:]
    ranks = np.where(is_inside[1:], table.of_bytes[pairs], _NO_MERGE)
    keys[: height - 1] = _keys(ranks, rows[:-1])
    columns = np.arange(width, dtype=np.int32)
    after = ((rows + 1) << _COLUMN_BITS) | columns
    after[lengths - 1, columns] = (height << _COLUMN_BITS) | columns
    before = ((rows - 1) << _COLUMN_BITS) | columns
    before[0] = ((height + 1) << _COLUMN_BITS) | columns
    _run(symbols.reshape(-1), keys, _links(after), _links(before), table)
    return symbols[:height, :width]


def _links(places: np.ndarray) -> np.ndarray:
    """Return [(rows + 2) << _COLUMN_BITS] int32 of places, with room for the two rows below."""
    links = np.zeros((len(places) + 2, _WIDTH), np.int32)
    links[: len(places), : places.shape[1]] = places
    return links.reshape(-1)


def _keys(ranks: np.ndarray, positions: np.ndarray) -> np.ndarray:
    keys: np.ndarray = np.where(
        ranks == _NO_MERGE, _NO_MERGE, (ranks << _POSITION_BITS) | positions
    )
    return keys


def _run(
    symbols: np.ndarray,
    keys: np.ndarray,
    after: np.ndarray,
    before: np.ndarray,
    table: MergeTable,
) -> None:
    """Merge in place until no word has a merge left; places are `position << bits | column`."""
    columns = np.arange(keys.shape[1], dtype=np.int32)
    while len(columns):
        best = keys.min(axis=0)
        inside = np.flatnonzero(best != _NO_MERGE).astype(np.int32)
        if 4 * len(inside) < 3 * len(columns):  # finished words leave
            keys, best = np.take(keys, inside, axis=1), best[inside]
            columns = columns[inside]
            inside = np.arange(len(inside), dtype=np.int32)
        best = best[inside]
        position = best & ((1 << _POSITION_BITS) - 1)
        place = (position << _COLUMN_BITS) | columns[inside]
        right = after[place]
        behind, front = after[right], before[place]
        made = table.results[best >> _POSITION_BITS]
        symbols[place] = made
        symbols[right] = _DEAD
        after[place] = behind
        before[behind] = place
        both = table.ranks_of(
            np.concatenate([made, symbols[front]]), np.concatenate([symbols[behind], made])
        )
        flat, width, num = keys.reshape(-1), len(columns), len(inside)
        front_row = front >> _COLUMN_BITS
        flat[(right >> _COLUMN_BITS) * width + inside] = _NO_MERGE
        flat[position * width + inside] = _keys(both[:num], position)
        flat[front_row * width + inside] = _keys(both[num:], front_row)
