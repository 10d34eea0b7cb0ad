"""The ends of a round under the interpreter equal their twins; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels.cuda.prefill_rows import launch_place_prompts
from runtime.kernels.cuda.round import launch_finish_round, launch_prepare_round
from runtime.kernels.cuda.row_copies import (
    launch_keep_rows,
    launch_side_by_side,
    launch_take_rows,
)
from runtime.kernels.prefill_rows import PromptRoom, place_prompts_twin
from runtime.kernels.round import finish_round_twin, prepare_round_twin

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

NUM_SLOTS = 5
PADDING = NUM_SLOTS
SIZE = 16


def slots_of(num_requests: int) -> torch.Tensor:
    """Return distinct slots, then padding."""
    real = torch.tensor([3, 0, 4])[: max(1, num_requests - 1)]
    padding = torch.full((num_requests - len(real),), PADDING)
    return torch.cat((real, padding))


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("num_requests", [1, 2, 5])
@pytest.mark.parametrize("num_blocks", [4, 300])
def test_prepare(num_requests: int, width: int, num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(width)
    lengths = torch.tensor([5, 0, 17, 33, 16, 0])
    newest = torch.randint(1, 99, (NUM_SLOTS + 1,), generator=generator)
    tables = torch.randint(1, 50, (NUM_SLOTS + 1, 303), generator=generator, dtype=torch.int32)
    tables[PADDING] = 0
    arguments = (slots_of(num_requests), lengths, newest, tables)
    sizes = {"num_blocks": num_blocks, "width": width, "kv_block_size": SIZE}
    got = launch_prepare_round(*arguments, **sizes)
    expected = prepare_round_twin(*arguments, **sizes)
    for name in expected.__slots__:
        found, wanted = getattr(got, name), getattr(expected, name)
        if name == "ids_target_BW":  # the rest is room for drafts
            found, wanted = found[:, :1], wanted[:, :1]
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_finish(num_requests: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    slots = slots_of(num_requests)
    wide = torch.randint(1, 99, (num_requests, width + 2), generator=generator)
    chosen = wide[:, 1 : width + 1]
    agreeing = torch.randint(0, width, (num_requests, 1), generator=generator)
    agreeing[0] = width - 1
    room = torch.where(torch.arange(width) <= agreeing, wide[:, :width], 0)  # ids, then drafts
    drafts = room[:, 1:]
    num_drafts = torch.full((num_requests,), width - 1)
    num_drafts[-1] = (width - 1) // 2
    lengths = torch.where(slots == PADDING, 0, 7 + slots)
    first_rows = torch.arange(num_requests) * width
    states, ends = [], []
    for finish in (launch_finish_round, finish_round_twin):
        state = {
            "lengths_S": torch.tensor([7, 8, 9, 10, 11, 0]),
            "newest_ids_target_S": torch.tensor([1, 2, 3, 4, 5, 0]),
            "output_BX": torch.full((6, 11), -7),
        }
        ends.append(
            finish(
                slots, lengths, drafts, chosen, num_drafts, first_rows,
                num_rows=max(1, num_requests * width - 1), **state,
            )
        )  # fmt: skip
        states.append(state)
    for name, found in states[0].items():
        assert torch.equal(found, states[1][name]), name
    for name in ends[0].__slots__:
        assert torch.equal(getattr(ends[0], name), getattr(ends[1], name)), name
    assert int(states[0]["lengths_S"][PADDING]) == 0
    accepted = int(ends[0].num_accepted_B[0])
    assert accepted == int(num_drafts[0])
    assert int(states[0]["lengths_S"][3]) == 11 + accepted


@pytest.mark.parametrize("num_blocks", [3, 300])
@pytest.mark.parametrize(
    ("num_rows", "num_places", "counts"),
    [
        (8, 1, (1,)),
        (8, 1, (5,)),
        (8, 1, (8,)),
        (260, 1, (256,)),
        (300, 3, (257,)),
        (64, 4, (1, 16, 17)),
        (300, 5, (20, 33, 16, 1, 150)),
        (96, 2, (48, 48)),
    ],
)
def test_prompts(num_rows: int, num_places: int, counts: tuple[int, ...], num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    room = PromptRoom(
        num_rows=num_rows, num_places=num_places, num_blocks=num_blocks, kv_block_size=SIZE
    )
    group = 16
    start = 21 if num_blocks == 300 else 0
    counts = tuple(
        min(count, num_blocks * SIZE - start - place) for place, count in enumerate(counts)
    )
    ends = [-(-count // group) * group for count in counts]
    firsts = [sum(ends[:place]) for place in range(len(counts))]
    tables = torch.randint(1, 900, (num_places, num_blocks), generator=generator)
    ids = torch.randint(0, 99, (num_rows,), generator=generator)
    scalars = torch.zeros((4, num_places), dtype=torch.int64)
    scalars[3] = num_rows
    for place, (count, first) in enumerate(zip(counts, firsts, strict=True)):
        scalars[:, place] = torch.tensor([4 + place, start + place, count, first])
    inputs = torch.cat((scalars.flatten(), tables.flatten(), ids))
    assert inputs.numel() == room.num_inputs
    got = launch_place_prompts(inputs, room, group_rows=group)
    expected = place_prompts_twin(inputs, room, group_rows=group)
    for name in expected.__slots__:
        found, wanted = getattr(got, name), getattr(expected, name)
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name
    for place, (count, first, end) in enumerate(zip(counts, firsts, ends, strict=True)):
        own = slice(first, first + count)
        begin = start + place
        assert got.positions_N[own].tolist() == list(range(begin, begin + count))
        assert torch.equal(got.ids_target_N[own], ids[own])
        assert torch.equal(got.next_ids_target_N[own][:-1], ids[own][1:])
        assert set(got.row_request_N[own].tolist()) == {place}
        blocks = tables[place, got.positions_N[own] // SIZE]
        assert torch.equal(got.kv_slots_N[own], blocks * SIZE + got.positions_N[own] % SIZE)
        assert int(got.last_rows_R[place]) == first + count - 1
        assert torch.equal(got.block_tables_QT[place].long(), tables[place])
        padding = slice(first + count, min(first + end, num_rows))
        assert set(got.row_request_N[padding].tolist()) <= {num_places}
        assert set(got.positions_N[padding].tolist()) <= {begin + count - 1}
        assert not got.kv_slots_N[padding].any()
    far = slice(min(num_rows, firsts[-1] + ends[-1]), num_rows)
    assert not got.positions_N[far].any()
    assert not got.kv_slots_N[far].any()
    assert (got.row_request_N[far] == num_places).all()
    assert not got.block_tables_QT[num_places].any()
    assert (got.last_rows_R[len(counts) :] == num_rows - 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_copies_of_rows(dtype: torch.dtype) -> None:
    table = torch.randn((7, 50), generator=torch.Generator().manual_seed(1)).to(dtype)[:, 5:45]
    index = torch.tensor([6, 0, 3])
    assert torch.equal(launch_take_rows(table, index), table[index])
    wide = torch.zeros((4, 45), dtype=dtype)
    part = wide[:3, 2:42]
    assert launch_take_rows(table, index, part) is part
    assert torch.equal(part, table[index])
    assert int(wide.count_nonzero()) == int(part.count_nonzero())
    kept = torch.zeros((5, 40), dtype=dtype)
    launch_keep_rows(table, index, kept, torch.tensor([4, 1, 0]))
    expected = torch.zeros_like(kept)
    expected[[4, 1, 0]] = table[index]
    assert torch.equal(kept, expected)
    states = [table, table * 2, table * 3]
    assert torch.equal(launch_side_by_side(states), torch.cat(states, dim=1))
