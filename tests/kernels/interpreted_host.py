"""What rounds and the host exchange, under the interpreter, equals its twins; see `interpreted.py`.

CPU memory stands in for pinned memory.
"""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels.cuda.outcomes import STORE_BLOCK, prepare_outcome_store
from runtime.kernels.cuda.round_inputs import prepare_batch_put, prepare_block_put
from runtime.kernels.outcomes import OutcomeTensors, outcome_store
from runtime.kernels.round_inputs import batch_put, block_put

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

CAPACITY = 12
POISON = -9


def outcomes(most: int, columns: int, *, has_counts: bool, has_chances: bool) -> OutcomeTensors:
    """Return numbers that are all different."""
    drafts = columns - 2
    return OutcomeTensors(
        output_BX=torch.arange(most * columns).view(most, columns) + 2**40,
        num_counted_B=torch.arange(most) + 2**33 if has_counts else None,
        confidence_BG=torch.arange(most * drafts).view(most, drafts) / 7 if has_chances else None,
    )


def poisoned(like: OutcomeTensors) -> OutcomeTensors:
    """Return tensors of the same shapes that hold nothing."""
    counted, chances = like.num_counted_B, like.confidence_BG
    return OutcomeTensors(
        output_BX=torch.full_like(like.output_BX, POISON),
        num_counted_B=None if counted is None else torch.full_like(counted, POISON),
        confidence_BG=None if chances is None else torch.full_like(chances, POISON),
    )


@pytest.mark.parametrize("has_counts", [False, True])
@pytest.mark.parametrize("has_chances", [False, True])
@pytest.mark.parametrize("columns", [3, 10])
def test_outcomes(columns: int, has_chances: bool, has_counts: bool) -> None:
    most = 2 * STORE_BLOCK // columns + 3  # three programs
    source = outcomes(most, columns, has_counts=has_counts, has_chances=has_chances)
    found, expected = poisoned(source), poisoned(source)
    store, copy = prepare_outcome_store(source, found), outcome_store(source, expected)
    for num_rows in (0, 1, 2, 33, STORE_BLOCK // columns + 1, most):
        store(num_rows)
        copy(num_rows)
        for ours, theirs in zip(found.tensors(), expected.tensors(), strict=True):
            assert torch.equal(ours, theirs), num_rows
    assert all(not bool((tensor == POISON).any()) for tensor in found.tensors())


@pytest.mark.parametrize("count", [0, 1, 5, CAPACITY])
def test_blocks(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    tables = [torch.zeros((7, 30), dtype=torch.int32) for _ in range(2)]
    entry = torch.full((2, CAPACITY), 10**8, dtype=torch.int32)  # no place of the table
    put, put_twin = prepare_block_put(tables[0], entry), block_put(tables[1], entry)
    assert not tables[0].any(), "what compiles puts nothing"
    entry[0, :count] = torch.randperm(7 * 30, generator=generator)[:count]
    entry[1, :count] = torch.randint(1, 10**6, (count,), generator=generator)
    put(entry, count)
    put_twin(entry, count)
    assert torch.equal(*tables)
    assert int((tables[0] != 0).sum()) == count


@pytest.mark.parametrize("num_lanes", [2, 6, CAPACITY])
def test_batches(num_lanes: int) -> None:
    padding = 5
    slots = [torch.full((num_lanes,), 77) for _ in range(2)]
    counts = [torch.full((num_lanes,), 88) for _ in range(2)]
    entry = torch.full((2, CAPACITY), 99, dtype=torch.int32)
    put = prepare_batch_put(slots[0], counts[0], entry, padding)
    assert slots[0].tolist() == [padding] * num_lanes, "all is padding at first"
    put_twin = batch_put(slots[1], counts[1], entry, padding_slot=padding)
    for count in (num_lanes, 1, 0, num_lanes - 1):
        entry[0, :count] = torch.arange(count) + 10 * count
        entry[1, :count] = torch.arange(count) + 20 * count
        put(entry, count)
        put_twin(entry, count)
        assert torch.equal(*slots)
        assert torch.equal(*counts)
        assert slots[0].tolist()[count:] == [padding] * (num_lanes - count)
        assert counts[0].tolist()[count:] == [0] * (num_lanes - count)
