"""A rank that is killed while rank 0 waits for it on the device: the wait ends with SD855."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch

from runtime.config import resolve_config
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, Lockstep, LockstepLeader
from runtime.engine.peers import Peers, Started
from runtime.engine.request import RequestDelta
from runtime.engine.staged import StagedModels
from runtime.engine.stages import StageLine
from runtime.loading import LoadedModels
from runtime.models import TargetModel
from runtime.parallel.gpu_groups import GpuGroups
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.layout import ParallelLayout
from runtime.parallel.lost import lost_peer
from runtime.parallel.pulse import pulse_key
from runtime.parallel.ranks import ONE_RANK
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.ops.emit_manifest import emit_manifest
from tests.queue_channel import QueueChannel
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3

TP2 = ParallelLayout(pipeline_parallel=1, tensor_parallel=2)


class DeviceWait:
    """A group in whose exchange a rank waits until it is aborted."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.aborted = threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.aborted.wait(60), "nothing ended the wait"

    def abort(self) -> None:
        self.aborted.set()


@dataclass
class FakeGroups:
    """What `Peers` asks of `ProcessGroups`, without processes."""

    layout: ParallelLayout
    gpu_groups: GpuGroups
    values: dict[str, str] = field(default_factory=dict)

    def publish(self, key: str, value: str) -> None:
        self.values[key] = value

    def peek(self, key: str) -> str | None:
        return self.values.get(key)

    def close(self) -> None:
        assert self.gpu_groups.wait(60)


class HangingEngine:
    """An engine whose step waits for another rank; what it makes then is nothing."""

    has_work = True

    def __init__(self, wait: DeviceWait, error: Exception | None) -> None:
        self._wait = wait
        self._error = error

    def step(self) -> tuple[RequestDelta, ...]:
        self._wait.wait()
        if self._error is not None:
            raise self._error
        return ()

    def close(self) -> None:
        """Hold nothing."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def peers_of(
    child: subprocess.Popen[bytes],
    wait: DeviceWait | None,
    *,
    rank_timeout_s: float,
    kind: type[FakeGroups] = FakeGroups,
) -> tuple[Peers, FakeGroups]:
    gpu_groups = GpuGroups()
    if wait is not None:
        gpu_groups.add(wait)
    groups = kind(TP2, gpu_groups)
    started = Started(children=(child,), store=None)
    return (
        Peers(cast("ProcessGroups", groups), started, rank_timeout_s=rank_timeout_s),
        groups,
    )


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> EngineOrder:
    directory: Path = tmp_path_factory.mktemp("lost")
    target = write_tiny_target(directory / "t")
    draft = write_agreeing_eagle3(directory / "d", target)
    manifest = emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    return EngineOrder(config=resolve_config(manifest))


def led(
    order: EngineOrder, wait: DeviceWait, error: Exception | None = None
) -> tuple[Lockstep, LockstepLeader]:
    lockstep = Lockstep(ONE_RANK)
    engine = cast("Engine", HangingEngine(wait, error))
    return lockstep, lockstep.open(order, lambda _: engine)


@pytest.mark.parametrize("error", [None, RuntimeError("device-side assert")])
def test_a_killed_rank_ends_a_step_that_waits_on_the_device(
    order: EngineOrder, child: subprocess.Popen[bytes], error: Exception | None
) -> None:
    """Whether the step comes to its end over anything or fails over it; far below the limit."""
    wait = DeviceWait()
    peers, _ = peers_of(child, wait, rank_timeout_s=3600.0)
    lockstep, leader = led(order, wait, error)
    assert peers.join(cast("TargetModel", None), lockstep) is None
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(leader.step)
        assert wait.entered.wait(60)
        child.kill()
        with pytest.raises(DiagnosticError, match="SD855"):
            step.result(60)
    with pytest.raises(DiagnosticError, match="SD855"):
        leader.step()
    assert peers.problem is not None
    assert peers.problem.found == "process of rank 1 has ended"
    peers.close()


class BusyGroups(FakeGroups):
    """This rank's own step goes on whenever the others are asked."""

    def peek(self, key: str) -> str | None:
        self.gpu_groups.num_exchanges += 1
        return super().peek(key)


def test_a_rank_that_shows_no_sign_of_life_is_lost_and_killed(
    order: EngineOrder, child: subprocess.Popen[bytes]
) -> None:
    """A process that stands still closes no connection, and the device waits without a limit."""
    wait = DeviceWait()
    peers, groups = peers_of(child, wait, rank_timeout_s=0.2, kind=BusyGroups)
    groups.publish(pulse_key(1), "0")
    lockstep, leader = led(order, wait)
    peers.join(cast("TargetModel", None), lockstep)
    with ThreadPoolExecutor(1) as pool, pytest.raises(DiagnosticError, match="SD855"):
        pool.submit(leader.step).result(60)
    assert peers.problem is not None
    assert peers.problem.found == "no sign of rank 1 in 0.2 s"
    assert child.wait(60) != 0
    peers.close()


@dataclass
class LivelyGroups(FakeGroups):
    """Every rank shows that it lives whenever it is asked."""

    num_asked: int = 0

    def peek(self, key: str) -> str | None:
        self.num_asked += 1
        return f"{key} {self.num_asked}"


def test_a_rank_that_lives_and_stands_still_in_a_step_is_noticed(
    order: EngineOrder, child: subprocess.Popen[bytes]
) -> None:
    """An engine without a step may be idle for longer."""
    wait = DeviceWait()
    peers, _ = peers_of(child, wait, rank_timeout_s=0.2, kind=LivelyGroups)
    lockstep, leader = led(order, wait)
    peers.join(cast("TargetModel", None), lockstep)
    peers._is_closing.wait(1.0)
    assert peers.problem is None
    with ThreadPoolExecutor(1) as pool, pytest.raises(DiagnosticError, match="SD855"):
        pool.submit(leader.step).result(60)
    assert peers.problem is not None
    assert peers.problem.found == "a step stands still for 0.2 s"
    assert child.wait(60) != 0
    peers.close()


def test_a_way_through_the_host_is_left_to_end_by_itself(
    order: EngineOrder, child: subprocess.Popen[bytes]
) -> None:
    """No group to abort: nobody asks for signs of life, and nothing is killed."""
    peers, _ = peers_of(child, None, rank_timeout_s=0.2)
    lockstep, leader = led(order, DeviceWait())
    peers.join(cast("TargetModel", None), lockstep)
    peers._is_closing.wait(1.0)
    assert peers.problem is None
    assert child.poll() is None
    assert leader.has_work
    assert child.stdin is not None
    child.stdin.close()  # it ends by itself
    while peers.problem is None:
        peers._is_closing.wait(0.01)
    peers.close()


class LateLockstep(Lockstep):
    """Rank 0 is held up once the other ranks were told to end."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        super().__init__(ONE_RANK)
        self._child = child

    def close(self) -> None:
        super().close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)
        time.sleep(0.6)  # longer than between two looks at the processes


def test_ranks_that_end_as_they_are_told_are_not_lost(
    child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Else stages before the last would not be told to end, and would be killed."""
    peers, _ = peers_of(child, None, rank_timeout_s=3600.0)
    lockstep = LateLockstep(child)
    peers.join(cast("TargetModel", None), lockstep)
    StagedModels(models=cast("LoadedModels", None), peers=peers, lockstep=lockstep).close()
    assert peers.problem is None
    assert not caplog.records


@pytest.mark.parametrize("code", ["SD855", "SD916"])
def test_a_step_that_lost_a_rank_is_the_last(order: EngineOrder, code: str) -> None:
    """And no request is taken afterwards; another fault leaves the ranks in step."""
    wait = DeviceWait()
    wait.abort()
    problem = diagnose(code, where="here", message="it broke")
    lockstep, leader = led(order, wait, DiagnosticError(problem))
    with pytest.raises(DiagnosticError, match=code):
        leader.step()
    assert lockstep.problem == (problem if code == "SD855" else None)


class AbortedChannel(QueueChannel):
    """A channel whose wait is ended by an abort: it looks as one that is through."""

    def __init__(self, lose: Callable[[], None]) -> None:
        super().__init__()
        self._lose = lose

    def receive(self) -> tuple[torch.Tensor, ...]:
        self._lose()
        return (torch.zeros(2, 4),)


class LastStage:
    first_layer = 2


def test_states_whose_wait_was_ended_are_not_taken_for_states() -> None:
    problem = lost_peer("process of rank 1 has ended")
    line = StageLine(
        cast("TargetModel", LastStage()),
        controls=[QueueChannel()],
        upstream=AbortedChannel(lambda: line.lose(problem)),
    )
    with pytest.raises(DiagnosticError) as caught:
        line.receive(())
    assert caught.value.diagnostics == (problem,)
    assert line.problem == problem
