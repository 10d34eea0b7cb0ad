"""What CUDA rounds and the host exchange in pinned memory equals what copies would bring."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.graphs.input_ring import NUM_ENTRIES
from runtime.graphs.outcomes import OutcomeBuffers
from runtime.graphs.recorder import capture_graph
from runtime.graphs.state import RoundState
from runtime.kernels.outcomes import OutcomeTensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
MOST = 33
POISON = -9
SLEEP = 400_000_000  # cycles: some tenths of a second, far more than the launches behind it take


def outcomes_of(width: int, *, has_counts: bool = True, has_chances: bool = True) -> OutcomeTensors:
    """Return room on the device for rounds of at most so many rows of each request."""
    drafts = max(0, width - 1)
    return OutcomeTensors(
        output_BX=torch.zeros((MOST, width + 1), dtype=torch.int64, device=CUDA),
        num_counted_B=torch.zeros(MOST, dtype=torch.int64, device=CUDA) if has_counts else None,
        confidence_BG=torch.zeros((MOST, drafts), device=CUDA) if has_chances and drafts else None,
    )


def draw(source: OutcomeTensors, generator: torch.Generator) -> None:
    """Fill tensors of the device with numbers of all sizes."""
    for tensor in source.tensors():
        if tensor.is_floating_point():
            tensor.uniform_(generator=generator)
        else:
            tensor.random_(-(2**62), 2**62, generator=generator)


def poison(buffers: OutcomeBuffers, buffer: int) -> None:
    for tensor in buffers.host[buffer].tensors():
        tensor.fill_(POISON)


@pytest.mark.parametrize("has_chances", [False, True])
@pytest.mark.parametrize("has_counts", [False, True])
@pytest.mark.parametrize("width", range(1, 10))
def test_outcomes_equal_copies(width: int, has_counts: bool, has_chances: bool) -> None:
    source = outcomes_of(width, has_counts=has_counts, has_chances=has_chances)
    buffers = OutcomeBuffers(source, num_buffers=2)
    generator = torch.Generator(CUDA).manual_seed(width)
    for num_rows in range(1, MOST + 1):
        buffer = num_rows % 2
        poison(buffers, buffer)
        draw(source, generator)
        buffers.store(buffer, num_rows, width + 1)
        found = buffers.read(buffer, num_rows)
        expected = [torch.full(t.shape, POISON, dtype=t.dtype) for t in source.tensors()]
        for copied, tensor in zip(expected, source.tensors(), strict=True):
            copied[:num_rows].copy_(tensor[:num_rows])
        for stored, copied in zip(buffers.host[buffer].tensors(), expected, strict=True):
            assert stored.is_pinned()
            assert torch.equal(stored, copied), num_rows
        assert found == expected[0][:num_rows].tolist()


def test_rounds_of_hundreds_of_requests_take_several_programs() -> None:
    source = OutcomeTensors(output_BX=torch.zeros((700, 10), dtype=torch.int64, device=CUDA))
    buffers = OutcomeBuffers(source, num_buffers=1)
    draw(source, torch.Generator(CUDA).manual_seed(1))
    for num_rows in (1, 51, 52, 700):
        poison(buffers, 0)
        buffers.store(0, num_rows, 10)
        assert buffers.read(0, num_rows) == source.output_BX[:num_rows].tolist()
        assert bool((buffers.host[0].output_BX[num_rows:] == POISON).all())


def test_outcomes_are_read_a_replay_late() -> None:
    """Two buffers in turn: the round behind changes the device's tensors before one is read."""
    source = outcomes_of(9)

    def round_() -> None:
        for tensor in source.tensors():
            tensor.add_(1)

    graph = capture_graph(round_, CUDA)
    for tensor in source.tensors():
        tensor.zero_()
    buffers = OutcomeBuffers(source, num_buffers=2)
    for turn in range(1, 201):
        graph.replay()
        buffers.store(turn % 2, 1 + turn % MOST, 10)
        if turn > 1:
            read_turn(buffers, turn - 1)


def read_turn(buffers: OutcomeBuffers, turn: int) -> None:
    """Read what the replay of that number left, and poison the buffer."""
    num_rows, buffer = 1 + turn % MOST, turn % 2
    assert buffers.read(buffer, num_rows) == [[turn] * 10] * num_rows
    assert buffers.counted(buffer, num_rows) == [turn] * num_rows
    assert buffers.confidence(buffer, num_rows) == [[float(turn)] * 8] * num_rows
    poison(buffers, buffer)


def test_a_store_waits_for_the_round_before_it() -> None:
    source = outcomes_of(4)
    buffers = OutcomeBuffers(source, num_buffers=1)
    poison(buffers, 0)
    for tensor in source.tensors():
        tensor.fill_(4)  # loads what fills: nothing below may wait for the device
    torch.cuda._sleep(SLEEP)
    for tensor in source.tensors():
        tensor.fill_(5)
    buffers.store(0, 3, 5)
    for tensor in source.tensors():
        tensor.fill_(6)
    assert int(buffers.host[0].output_BX[0, 0]) == POISON, "the device was not busy"
    assert buffers.read(0, 3) == [[5] * 5] * 3
    assert buffers.counted(0, 3) == [5] * 3


def make_state(max_batch: int = MOST) -> RoundState:
    return RoundState(
        num_slots=max_batch,
        max_batch=max_batch,
        max_drafts=8,
        max_length=4096,
        kv_block_size=16,
        device=CUDA,
    )


@pytest.mark.parametrize("is_busy", [False, True])
def test_blocks_and_batches_that_wrap_around(is_busy: bool) -> None:
    """Every write is what it was when it was made, however late the device comes to it."""
    state, rng = make_state(), random.Random(is_busy)
    expected = torch.zeros(state.block_tables_ST.shape, dtype=torch.int32)
    num_turns = 3 * NUM_ENTRIES + 5
    kept = (state.block_tables_ST, state.slots_B, state.num_drafts_B)
    seen = [torch.zeros((num_turns, *tensor.shape), dtype=tensor.dtype).cuda() for tensor in kept]
    wanted: list[tuple[torch.Tensor, list[int], list[int]]] = []
    torch.cuda.synchronize()
    idle = torch.cuda.Event()  # type: ignore[no-untyped-call]
    if is_busy:
        torch.cuda._sleep(SLEEP)
    idle.record()
    for turn in range(num_turns):
        cells = [
            (place // 256, place % 256, rng.randrange(1, 2**31))
            for place in rng.sample(range(MOST * 256), 1 + turn % 40)
        ]
        count = 1 + turn % MOST
        slots, drafts = rng.sample(range(MOST), count), rng.choices(range(9), k=count)
        state.write_blocks(cells)
        state.write_batch(slots, drafts)
        if is_busy and turn == NUM_ENTRIES // 2 - 2:  # the host has not come round yet
            assert not idle.query(), "the device was not busy"
        for tensor, copied in zip(kept, seen, strict=True):
            copied[turn].copy_(tensor)
        for slot, index, block in cells:
            expected[slot, index] = block
        rest = MOST + 1 - count
        wanted.append((expected.clone(), [*slots, *[MOST] * rest], [*drafts, *[0] * rest]))
    for turn, (table_then, slots, drafts) in enumerate(wanted):
        table, slots_B, drafts_B = (copied[turn].cpu() for copied in seen)
        assert torch.equal(table, table_then), turn
        assert (slots_B.tolist(), drafts_B.tolist()) == (slots, drafts), turn


@pytest.mark.parametrize("max_batch", range(1, MOST + 1))
def test_batches_of_every_size(max_batch: int) -> None:
    state = make_state(max_batch)
    assert state.slots_B.tolist() == [max_batch] * (max_batch + 1)
    for count in (max_batch, 1, max_batch // 2, 0, max_batch):
        slots, drafts = range(count), [slot % 9 for slot in range(count)]
        state.write_batch(slots, drafts)
        rest = max_batch + 1 - count
        assert state.slots_B.tolist() == [*slots, *[max_batch] * rest]
        assert state.num_drafts_B.tolist() == [*drafts, *[0] * rest]


def test_more_cells_than_entries_hold() -> None:
    state = make_state(300)
    num_cells = 300 * 256
    cells = [(place // 256, place % 256, 1 + place) for place in range(num_cells)]
    random.Random(3).shuffle(cells)
    torch.cuda._sleep(SLEEP)
    state.write_blocks(cells)
    assert torch.equal(
        state.block_tables_ST[:300].flatten().cpu(),
        torch.arange(1, num_cells + 1, dtype=torch.int32),
    )
    assert not bool(state.block_tables_ST[300].any())
