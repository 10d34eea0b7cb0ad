"""Byte ranges of blocks, for carriers that know addresses and lengths only.

A pool layer is [num_blocks, num_kv_heads, kv_block_size, head_dim], so consecutive heads of a block
are one range; ranges that follow each other on both sides become one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer


class LayerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer lies in a process.

    Args:
        keys: address of its first key.
        values: address of its first value.
        num_bytes: of the keys, and of the values.
        block_bytes: of the keys of one block.
        head_bytes: of the keys of one head of a block.
        device: CUDA device index; None on the CPU.
    """

    keys: int
    values: int
    num_bytes: int
    block_bytes: int
    head_bytes: int
    device: int | None


def places_of(layers: Sequence[KVLayer]) -> list[LayerPlace]:
    """Return where each layer of a pool lies."""
    places = []
    for layer in layers:
        num_blocks, num_heads, kv_block_size, head_dim = layer.k.shape
        head_bytes = kv_block_size * head_dim * layer.k.dtype.itemsize
        places.append(
            LayerPlace(
                keys=layer.k.data_ptr(),
                values=layer.v.data_ptr(),
                num_bytes=num_blocks * num_heads * head_bytes,
                block_bytes=num_heads * head_bytes,
                head_bytes=head_bytes,
                device=layer.k.device.index if layer.k.is_cuda else None,
            )
        )
    return places


def byte_ranges(
    move: BlockMove, source: LayerPlace, destination: LayerPlace
) -> list[tuple[int, int, int]]:
    """Return (source address, destination address, bytes) of everything that a move copies."""
    assert source.head_bytes == destination.head_bytes, "the handshake compares block sizes"
    length = move.num_heads * source.head_bytes
    found: list[tuple[int, int, int]] = []
    for origin, goal in ((source.keys, destination.keys), (source.values, destination.values)):
        begin = origin + move.source_head * source.head_bytes
        end = goal + move.destination_head * destination.head_bytes
        for block, other in zip(move.source_blocks, move.destination_blocks, strict=True):
            read, written = (
                begin + block * source.block_bytes,
                end + other * destination.block_bytes,
            )
            if found:
                last_read, last_written, last = found[-1]
                if (last_read + last, last_written + last) == (read, written):
                    found[-1] = (last_read, last_written, last + length)
                    continue
            found.append((read, written, length))
    return found
