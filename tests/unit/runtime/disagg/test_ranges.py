"""Byte ranges cover what a move names, and ranges that follow each other are one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disagg.copies import BlockIndices, copy_blocks
from runtime.disagg.ranges import byte_ranges, places_of
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer


def pool(num_heads: int, value: int) -> tuple[KVLayer, ...]:
    count = 6 * num_heads * 2 * 4
    keys = (torch.arange(count) % 251 + value).to(torch.float16).view(6, num_heads, 2, 4)
    return (KVLayer(k=keys, v=keys + 1000),)


def copy_bytes(source: KVLayer, goal: KVLayer, ranges: list[tuple[int, int, int]]) -> None:
    """Carry ranges out with the addresses of the tensors that they lie in."""
    ours = [(half.data_ptr(), half.view(torch.uint8).flatten()) for half in (source.k, source.v)]
    theirs = [(half.data_ptr(), half.view(torch.uint8).flatten()) for half in (goal.k, goal.v)]
    for read, written, length in ranges:
        base, data = next(item for item in ours if 0 <= read - item[0] < item[1].numel())
        start, out = next(item for item in theirs if 0 <= written - item[0] < item[1].numel())
        out[written - start : written - start + length] = data[read - base : read - base + length]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_ranges_are_the_copy(data: st.DataObject) -> None:
    heads_in, heads_out = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(2))
    count = data.draw(st.integers(1, min(heads_in, heads_out)))
    num_blocks = data.draw(st.integers(1, 5))
    pick = st.lists(st.integers(0, 5), min_size=num_blocks, max_size=num_blocks, unique=True)
    move = BlockMove(
        source_layer=0,
        destination_layer=0,
        source_head=data.draw(st.integers(0, heads_in - count)),
        destination_head=data.draw(st.integers(0, heads_out - count)),
        num_heads=count,
        source_blocks=tuple(data.draw(pick)),
        destination_blocks=tuple(data.draw(pick)),
    )
    source = pool(heads_in, 0)
    expected, found = pool(heads_out, 500), pool(heads_out, 500)
    copy_blocks(move, source, expected, BlockIndices())
    ranges = byte_ranges(move, places_of(source)[0], places_of(found)[0])
    copy_bytes(source[0], found[0], ranges)
    assert torch.equal(found[0].k, expected[0].k)
    assert torch.equal(found[0].v, expected[0].v)
    assert sum(length for *_, length in ranges) == move.num_bytes(source[0])


def test_whole_blocks_in_a_row_are_one_range() -> None:
    move = BlockMove(
        source_layer=0,
        destination_layer=0,
        source_head=0,
        destination_head=0,
        num_heads=2,
        source_blocks=(1, 2, 4),
        destination_blocks=(3, 4, 5),
    )
    places = places_of(pool(2, 0))
    assert [length // places[0].block_bytes for *_, length in byte_ranges(move, *places * 2)] == [
        2,
        1,
        2,
        1,
    ]
