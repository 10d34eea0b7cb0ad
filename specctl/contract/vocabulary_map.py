"""Vocabulary-map algebra: offsets on disk, absolute target ids in code.

On disk `d2t` holds int64 offsets: target = draft + d2t[draft]; `t2d` is a mask over target ids.
In code `draft_to_target` holds absolute target ids in draft-id order, not always ascending.
*Source:* SafeAILab EAGLE-3 (offset and mask); ModelOpt writes rank order with negative offsets.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from specctl.contract.fingerprint import digest_bytes


def offsets_to_absolute(d2t: Sequence[int]) -> tuple[int, ...]:
    """Return target ids [R] for on-disk offsets [R]."""
    return tuple(draft_id + offset for draft_id, offset in enumerate(d2t))


def absolute_to_offsets(draft_to_target: Sequence[int]) -> tuple[int, ...]:
    """Return on-disk offsets [R] for target ids [R]; inverse of `offsets_to_absolute`."""
    return tuple(target_id - draft_id for draft_id, target_id in enumerate(draft_to_target))


def target_mask(draft_to_target: Sequence[int], target_vocab_size: int) -> bytes:
    """Return `t2d` as bytes [V], 1 where the target id is in the map.

    Raises:
        IndexError: an id is outside [0, V).
    """
    mask = bytearray(target_vocab_size)
    for target_id in draft_to_target:
        if not 0 <= target_id < target_vocab_size:
            raise IndexError(f"target id {target_id} outside [0, {target_vocab_size})")
        mask[target_id] = 1
    return bytes(mask)


def map_digest(draft_to_target: Sequence[int]) -> str:
    """Return `sha256:<hex>` over the absolute ids as little-endian int64, in draft-id order."""
    return digest_bytes(pack_int64(draft_to_target))


def pack_int64(values: Sequence[int]) -> bytes:
    """Return the values as little-endian int64, the form of `d2t` on disk and under the digest."""
    packed = array("q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
