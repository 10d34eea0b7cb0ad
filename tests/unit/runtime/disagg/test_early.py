"""Early transfer: no block leaves before its kernel is done, and a failed link ends alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from runtime.disagg.early import EarlySender
from runtime.disagg.failures import carrier_failed
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.transport import BlockMove, Link
from runtime.graphs.marks import NoMark, mark
from runtime.kv import KVLayer
from specctl.contract.diagnostics import DiagnosticError

BLOCKS = (0, 1, 2)
DELAY_S = 0.03


def pool(value: float) -> tuple[KVLayer, ...]:
    shape = (4, 2, 4, 8)
    return tuple(KVLayer(k=torch.full(shape, value), v=torch.full(shape, value)) for _ in range(3))


def layer_move(layer: int) -> BlockMove:
    return BlockMove(
        source_layer=layer,
        destination_layer=layer,
        source_head=0,
        destination_head=0,
        num_heads=2,
        source_blocks=BLOCKS,
        destination_blocks=BLOCKS,
    )


class SlowKernel:
    """Writes a layer some time after it may, as a GPU would; its event waits for that."""

    def __init__(self, layer: KVLayer, value: float, may_begin: threading.Event) -> None:
        self._layer, self._value, self._may_begin = layer, value, may_begin
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._may_begin.wait(60)
        time.sleep(DELAY_S)
        self._layer.k.fill_(self._value)
        time.sleep(DELAY_S)  # a torn read would see new keys and old values
        self._layer.v.fill_(self._value)

    def synchronize(self) -> None:
        self._thread.join()

    wait = synchronize  # a CPU has no stream that could wait


class WithoutWait:
    """The defect that the wait is for: an event that is thought to be over."""

    def __init__(self, kernel: SlowKernel) -> None:
        self.kernel = kernel

    def synchronize(self) -> None:
        return

    wait = synchronize


def transfer(*, is_waited_for: bool, is_ordered: bool) -> list[bool]:
    """Send three layers whose kernels are slow; return which arrived whole.

    Kernels that are not waited for begin when all was sent, however late the sender's thread is.
    """
    transport = MemoryTransport()
    source, destination = pool(0.0), pool(-1.0)
    link = transport.connect(transport.receive_into(destination).address, source)
    link.is_ordered = is_ordered
    sender, may_begin = EarlySender(), threading.Event()
    if is_waited_for:
        may_begin.set()
    kernels = []
    for index, layer in enumerate(source):
        kernel = SlowKernel(layer, index + 1.0, may_begin)
        kernels.append(kernel)
        ready = kernel if is_waited_for else WithoutWait(kernel)
        sender.send(link, (layer_move(index),), ready=ready)
    outcome = sender.end(link, timeout_s=5.0)
    assert outcome.is_done or not is_ordered
    assert outcome.wait(20)
    assert outcome.problem is None
    may_begin.set()
    sender.close()
    for kernel in kernels:
        kernel.synchronize()
    return [
        bool((layer.k[:3] == index + 1).all() and (layer.v[:3] == index + 1).all())
        for index, layer in enumerate(destination)
    ]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_no_block_is_torn(is_ordered: bool) -> None:
    assert transfer(is_waited_for=True, is_ordered=is_ordered) == [True, True, True]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_without_the_wait_blocks_are_torn(is_ordered: bool) -> None:
    assert not all(transfer(is_waited_for=False, is_ordered=is_ordered))


def test_an_ordered_link_waits_in_its_stream_before_each_write() -> None:
    """The host goes on: nothing of it may block on a kernel, and no thread writes."""
    calls: list[str] = []

    class Mark:
        def synchronize(self) -> None:
            raise AssertionError("the host waits for a kernel")

        def wait(self) -> None:
            calls.append("wait")

    class Noted:
        is_ordered = True

        def write(self, move: BlockMove) -> None:
            calls.append(f"{move.source_layer} {threading.current_thread().name}")

        def finish(self, timeout_s: float) -> None:
            del timeout_s
            calls.append("finish")

        def close(self) -> None:
            return

    sender, link = EarlySender(), Noted()
    for index in range(2):
        sender.send(link, (layer_move(index),), ready=Mark())
    assert sender.end(link, timeout_s=1.0).is_done
    here = threading.current_thread().name
    assert calls == ["wait", f"0 {here}", "wait", f"1 {here}", "finish"]
    sender.close()


class Broken:
    """A link whose carrier fails at the second write."""

    def __init__(self, at: int, *, is_ordered: bool = False) -> None:
        self.at, self.writes, self.is_ordered = at, 0, is_ordered

    def write(self, move: BlockMove) -> None:
        del move
        self.writes += 1
        if self.writes == self.at:
            raise DiagnosticError(carrier_failed("broken", "gone"))

    def finish(self, timeout_s: float) -> None:
        del timeout_s
        if not self.at:
            raise RuntimeError("device-side fault\nmore")

    def close(self) -> None:
        return


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize(("at", "found"), [(2, "gone"), (0, "device-side fault")])
def test_a_failed_link_says_why_and_others_go_on(at: int, found: str, is_ordered: bool) -> None:
    transport = MemoryTransport()
    source, destination = pool(1.0), pool(0.0)
    good: Link = transport.connect(transport.receive_into(destination).address, source)
    bad = Broken(at, is_ordered=is_ordered)
    sender = EarlySender()
    for index in range(3):
        for link in (bad, good):
            sender.send(link, (layer_move(index),), ready=NoMark())
    broken, whole = sender.end(bad, timeout_s=1.0), sender.end(good, timeout_s=1.0)
    assert broken.wait(20)
    assert whole.wait(20)
    assert broken.problem is not None
    assert (broken.problem.code, broken.problem.found) == ("SD863", found)
    assert bad.writes == (2 if at else 3)
    assert whole.problem is None
    assert all((layer.k[:3] == 1).all() for layer in destination)
    assert not any((layer.k[3] == 1).any() for layer in destination)
    again = sender.end(bad, timeout_s=1.0)  # a link may be used again after its outcome
    assert again.wait(20)
    assert (again.problem is None) == bool(at)
    sender.close()


def test_a_cpu_is_done_when_a_call_returns() -> None:
    assert isinstance(mark(torch.device("cpu")), NoMark)
