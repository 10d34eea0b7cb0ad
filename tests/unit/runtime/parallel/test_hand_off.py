"""Hand-offs beside a channel's headers: a ring that two processes map, and what is packed in it.

The processes are real and the headers travel over gloo; shared memory stands for a GPU's.
"""

from __future__ import annotations

import logging
import math
import time
from multiprocessing.queues import Queue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.parallel.channels import DistributedChannel
from runtime.parallel.hand_off import RING_SIZE, RingHandOff
from runtime.parallel.packing import described, packed_bytes, views_of
from specctl.contract.diagnostics import DiagnosticError
from tests.rank_processes import LIMIT_S, join_group, two_processes
from tests.shared_slots import HostSlots

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
NUM_MESSAGES = 3 * RING_SIZE


def message(number: int) -> tuple[torch.Tensor, ...]:
    """Return a message; later ones are larger, so that every slot is outgrown at least once."""
    generator = torch.Generator().manual_seed(number)
    rows = 3 + 40 * number
    return (
        torch.randn(rows, 64, generator=generator).to(torch.bfloat16),
        torch.randn(rows, 33, generator=generator).T.contiguous().T,
        torch.empty(0, 7),
        torch.tensor(number),
    )


def is_message(found: tuple[torch.Tensor, ...], number: int) -> bool:
    expected = message(number)
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
        ),
        max_size=6,
    ),
    room=st.integers(0, 300),
)
def test_packed_tensors_lie_apart_and_are_found_again(
    parts: list[tuple[torch.dtype, tuple[int, ...]]], room: int
) -> None:
    buffer_N = torch.zeros(packed_bytes(parts) + room, dtype=torch.uint8)
    views = views_of(buffer_N, parts)
    assert described(views) == parts
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    assert all(bool((view == number).all()) for number, view in enumerate(views, start=1))
    used = sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)
    assert packed_bytes(parts) >= used


class LateRing(RingHandOff):
    """A sender that a busy machine holds up before it asks for the first answer."""

    def complete(self) -> bool:
        if self._num_messages == 1:
            time.sleep(1)
        return super().complete()


def process(rank: int, port: int, is_refused: bool, out: Queue[tuple[int, object]]) -> None:
    """Rank 0 sends all messages twice over; rank 1 receives them, then loses its peer."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage()[:5])  # type: ignore[method-assign]
    logging.getLogger("runtime.parallel.channels").addHandler(handler)
    group = join_group(rank, port)
    slots = HostSlots(is_refused=is_refused)
    channel = DistributedChannel(
        group, 1 - rank, device=CPU, hand_off=LateRing(group, 1 - rank, slots)
    )
    other_way = DistributedChannel(group, 1 - rank, device=CPU)
    if rank == 0:
        for number in range(NUM_MESSAGES):
            channel.send(message(number))
        channel.flush()
        (sum_of_marks,) = other_way.receive()
        out.put((rank, [warnings, len(slots.slots), int(sum_of_marks)]))
        slots.close()
        return
    is_right = [is_message(channel.receive(), number) for number in range(NUM_MESSAGES)]
    other_way.send([torch.tensor(sum(slot.marks["read"] for slot in slots.slots))])
    other_way.flush()
    code = ""
    try:
        channel.receive()
    except DiagnosticError as error:
        code = error.diagnostics[0].code
    out.put((rank, [all(is_right), len(slots.slots), code]))


@pytest.mark.dist
@pytest.mark.parametrize("is_refused", [False, True])
def test_two_processes_hand_over_through_a_ring(is_refused: bool) -> None:
    """Where memory cannot be mapped, both ends go on through the host and say so once."""
    with two_processes(process, is_refused) as out:
        results = dict(out.get(timeout=LIMIT_S) for _ in range(2))
    warnings, num_offered, num_read = results[0]
    is_right, num_opened, code = results[1]
    assert (is_right, code) == (True, "SD855")
    if is_refused:
        assert (warnings, num_offered, num_opened, num_read) == (["SD875"], 1, 0, 0)
        return
    assert (warnings, num_read) == ([], NUM_MESSAGES)
    assert num_offered == num_opened
    assert num_offered > RING_SIZE, "a slot that is too small is replaced"
