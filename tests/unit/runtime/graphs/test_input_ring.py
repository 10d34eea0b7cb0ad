"""What the host writes for rounds stands until its kernel has run, whatever the device is doing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
import torch

from runtime.graphs.input_ring import InputRing
from runtime.graphs.state import RoundState
from runtime.kernels.round_inputs import Put, batch_put, block_put

CPU = torch.device("cpu")


class LateDevice:
    """Runs what was launched when somebody waits, in order and no further than asked."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self.num_waits = 0

    def late(self, put: Put) -> Put:
        return lambda entry, count: self._queue.append(lambda: put(entry, count))

    def mark(self, device: torch.device) -> LateMark:
        assert device == CPU
        return LateMark(self)

    def add(self, step: Callable[[], None]) -> None:
        self._queue.append(step)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while self._queue and not is_done():
            self._queue.popleft()()


class LateMark:
    """An event of a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._is_reached = True

    def record(self) -> None:
        self._is_reached = False
        self._device.add(self._reach)

    def synchronize(self) -> None:
        self._device.num_waits += not self._is_reached
        self._device.run_until(lambda: self._is_reached)

    def wait(self) -> None:
        raise AssertionError("a ring waits on the host")

    def _reach(self) -> None:
        self._is_reached = True


@pytest.mark.parametrize("num_entries", [1, 2, 5])
def test_an_entry_waits_for_the_kernel_that_reads_it(num_entries: int) -> None:
    device, rng = LateDevice(), random.Random(num_entries)
    ring = InputRing(capacity=6, device=CPU, make_mark=device.mark, num_entries=num_entries)
    table = torch.zeros((4, 50), dtype=torch.int32)
    put = device.late(block_put(table, ring.example))
    places = rng.sample(range(200), 60)
    expected = torch.zeros(200, dtype=torch.int32)
    num_launches, start = 0, 0
    while start < len(places):
        part = places[start : start + rng.randint(1, 6)]
        blocks = [1000 + place for place in part]
        ring.launch(put, part, blocks)
        expected[torch.tensor(part)] = torch.tensor(blocks, dtype=torch.int32)
        start, num_launches = start + len(part), num_launches + 1
    assert device.num_waits == num_launches - num_entries, "the first ones wait for nobody"
    device.run_until(lambda: False)
    assert torch.equal(table.view(-1), expected)


def test_kernels_of_two_kinds_share_the_entries() -> None:
    device = LateDevice()
    ring = InputRing(capacity=3, device=CPU, make_mark=device.mark, num_entries=2)
    table = torch.zeros((2, 9), dtype=torch.int32)
    slots, counts = torch.full((3,), -1), torch.full((3,), -1)
    blocks = device.late(block_put(table, ring.example))
    batch = device.late(batch_put(slots, counts, ring.example, padding_slot=7))
    for turn in range(6):
        ring.launch(blocks, [turn], [100 + turn])
        ring.launch(batch, range(turn % 4), range(turn, turn + turn % 4))
    device.run_until(lambda: False)
    assert table[0].tolist() == [100, 101, 102, 103, 104, 105, 0, 0, 0]
    assert (slots.tolist(), counts.tolist()) == ([0, 7, 7], [5, 0, 0])


def test_entries_begin_where_kernels_expect_them() -> None:
    ring = InputRing(capacity=129, device=CPU, num_entries=3)
    assert ring.capacity == 132
    assert ring.example.shape == (2, 132)
    seen: list[int] = []
    for _ in range(3):
        ring.launch(lambda entry, _: seen.append(entry.storage_offset()), [1], [2])
    assert seen == [0, 264, 528]
    assert all(offset % 4 == 0 for offset in seen)


def test_more_cells_than_an_entry_holds_take_several() -> None:
    state = RoundState(
        num_slots=40, max_batch=2, max_drafts=1, max_length=200, kv_block_size=8, device=CPU
    )
    cells = [(slot, index, 1 + slot * 25 + index) for slot in range(40) for index in range(25)]
    random.Random(1).shuffle(cells)
    state.write_blocks(cells)
    assert state.block_tables_ST[:40].flatten().tolist() == list(range(1, 1001))
    assert not state.block_tables_ST[40].any(), "the padding slot has no blocks"
    state.write_blocks([])
    state.write_blocks([(39, 24, 5)])
    assert state.block_tables_ST[39, 23:].tolist() == [999, 5]
