"""Groups that wait on the device: an abort ends their waits, and nothing is launched after it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, not listed

from runtime.parallel.gpu_groups import GpuGroups
from runtime.parallel.lost import lost_peer
from runtime.parallel.pulse import Progress, Pulse, PulseWatch, StepWatch, pulse_key
from runtime.parallel.ranks import DistributedRanks
from specctl.contract.diagnostics import DiagnosticError

LOST = lost_peer("process of rank 1 has ended")


class FakeGroup:
    """A group whose abort waits for `graphs_gone`, as one that a captured graph holds."""

    def __init__(self, *, is_held: bool = False, error: str | None = None) -> None:
        self.graphs_gone = threading.Event()
        if not is_held:
            self.graphs_gone.set()
        self.aborted = threading.Event()
        self.num_aborts = 0
        self._error = error

    def abort(self) -> None:
        self.num_aborts += 1
        self.aborted.set()
        if self._error is not None:
            raise RuntimeError(self._error)
        self.graphs_gone.wait(60)


def groups_of(*found: FakeGroup) -> GpuGroups:
    groups = GpuGroups()
    for group in found:
        groups.add(group)
    return groups


def test_every_group_is_aborted_once_and_the_first_reason_stays() -> None:
    found = (FakeGroup(), FakeGroup())
    groups = groups_of(*found)
    groups.check()
    groups.abort(LOST)
    groups.abort(lost_peer("later"))
    assert groups.wait(60)
    assert [group.num_aborts for group in found] == [1, 1]
    with pytest.raises(DiagnosticError) as caught:
        groups.check()
    assert caught.value.diagnostics == (LOST,)


def test_an_abort_that_waits_for_a_graph_holds_nobody_up() -> None:
    """The other groups are aborted meanwhile, and `wait` says what is left."""
    held, other = FakeGroup(is_held=True), FakeGroup()
    groups = groups_of(held, other)
    groups.abort(LOST)
    assert held.aborted.wait(60)
    assert other.aborted.wait(60)
    assert not groups.wait(0.0)
    held.graphs_gone.set()
    assert groups.wait(60)


def test_a_group_that_cannot_be_aborted_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    groups = groups_of(FakeGroup(error="no such communicator\nat line 5"))
    with caplog.at_level(logging.WARNING):
        groups.abort(LOST)
        assert groups.wait(60)
    assert "no such communicator" in caplog.text
    assert "line 5" not in caplog.text


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ranks_exchange_nothing_over_groups_that_were_aborted() -> None:
    """A group that is being aborted may hold its lock for as long as a graph lives."""
    world = dist.group.WORLD
    assert world is not None
    groups = groups_of(FakeGroup())
    ranks = DistributedRanks(world, gpu_groups=groups)
    assert ranks.gather(torch.tensor([3, 4])).tolist() == [[3, 4]]
    assert groups.num_exchanges == 1
    groups.abort(LOST)
    with pytest.raises(DiagnosticError) as caught:
        ranks.gather(torch.tensor([3, 4]))
    assert caught.value.diagnostics == (LOST,)


class DictBoard:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.said = threading.Semaphore(0)
        self.is_gone = False

    def publish(self, key: str, value: str) -> None:
        if self.is_gone:
            raise DiagnosticError(LOST)
        self.values[key] = value
        self.said.release()

    def peek(self, key: str) -> str | None:
        return self.values.get(key)


class SlowBoard(DictBoard):
    """A store that takes a while for every word but the first."""

    DELAY_S = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.is_busy = threading.Event()

    def publish(self, key: str, value: str) -> None:
        if self.values:
            self.is_busy.set()
            time.sleep(self.DELAY_S)
        super().publish(key, value)


def test_a_rank_that_says_nothing_new_is_named() -> None:
    board, clock_s = DictBoard(), [0.0]
    watch = PulseWatch(board, (1, 2), limit_s=10.0, now=lambda: clock_s[0])
    for second in range(0, 30, 5):
        clock_s[0] = float(second)
        board.publish(pulse_key(1), str(second))
        board.publish(pulse_key(2), str(min(second, 10)))
        silent = watch.silent_rank()
        assert silent == (2 if second > 20 else None)


def test_a_rank_that_never_says_anything_is_named() -> None:
    clock_s = [0.0]
    watch = PulseWatch(DictBoard(), (1,), limit_s=10.0, now=lambda: clock_s[0])
    clock_s[0] = 10.0
    assert watch.silent_rank() is None
    clock_s[0] = 10.5
    assert watch.silent_rank() == 1


def test_a_step_that_shows_nothing_new_stands_still() -> None:
    """One that goes on has other numbers; between steps there is all the time."""
    clock_s, shown = [0.0], list[Progress | None]([None])
    watch = StepWatch(lambda: shown[0], limit_s=10.0, now=lambda: clock_s[0])
    for second, progress, is_standing in (
        (100, None, False),
        (200, (0, 0), False),
        (209, (0, 0), False),
        (211, (0, 0), True),
        (212, (0, 1), False),
        (222, (0, 1), False),
        (223, (1, 1), False),
        (234, (1, 1), True),
        (235, None, False),
        (300, None, False),
        (301, (1, 1), False),
    ):
        clock_s[0], shown[0] = float(second), progress
        assert watch.is_standing() == is_standing, second


def test_a_pulse_says_new_things_until_the_store_is_gone() -> None:
    """Then the waits of its process end, which nobody else could end."""
    board, group = DictBoard(), FakeGroup()
    groups = groups_of(group)
    with Pulse(board, 3, every_s=0.001, on_lost=groups.abort):
        seen: set[str] = set()
        while len(seen) < 3:
            assert board.said.acquire(timeout=60)
            seen.add(board.values[pulse_key(3)])
        assert groups.problem is None
        board.is_gone = True
        assert group.aborted.wait(60)
    assert groups.problem == LOST


def test_a_pulse_that_is_over_says_nothing_more() -> None:
    board, group = SlowBoard(), FakeGroup()
    with Pulse(board, 3, every_s=0.001, on_lost=groups_of(group).abort):
        assert board.said.acquire(timeout=60)
        assert board.is_busy.wait(60)
    said = board.values[pulse_key(3)]
    board.is_gone = True
    time.sleep(2 * SlowBoard.DELAY_S)
    assert board.values[pulse_key(3)] == said
    assert group.num_aborts == 0
