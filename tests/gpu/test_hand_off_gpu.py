"""On one stream no hand-off waits for the host, and slow kernels are waited for all the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from runtime.disagg.early import EarlySender
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.transport import BlockMove, Link
from runtime.graphs.marks import mark
from runtime.kv import KVLayer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SLOW_CYCLES = 40_000_000  # some 20 ms
SHAPE = (8, 2, 16, 64)


def pool(value: float) -> tuple[KVLayer, ...]:
    return tuple(
        KVLayer(
            k=torch.full(SHAPE, value, device=DEVICE), v=torch.full(SHAPE, value, device=DEVICE)
        )
        for _ in range(3)
    )


def move(layer: int, source: tuple[int, ...], destination: tuple[int, ...]) -> BlockMove:
    return BlockMove(
        source_layer=layer,
        destination_layer=layer,
        source_head=0,
        destination_head=0,
        num_heads=2,
        source_blocks=source,
        destination_blocks=destination,
    )


def compute_and_send(
    source: Sequence[KVLayer],
    link: Link,
    sender: EarlySender,
    blocks: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    value: float,
    cycles: int,
) -> torch.cuda.Event:
    """Launch slow kernels of every layer and send each; return what marks their end."""
    for index, layer in enumerate(source):
        torch.cuda._sleep(cycles)
        layer.k.fill_(index + value)
        torch.cuda._sleep(cycles)
        layer.v.fill_(index + value)
        sender.send(link, (move(index, *blocks),), ready=mark(DEVICE))
    last = torch.cuda.Event()
    last.record()
    return last


@pytest.mark.parametrize("is_one_stream", [True, False])
@pytest.mark.parametrize("is_run", [True, False])
def test_slow_kernels_are_waited_for(is_one_stream: bool, is_run: bool) -> None:
    blocks = ((1, 2, 3), (4, 5, 6)) if is_run else ((3, 1, 2), (6, 4, 0))
    transport, sender = MemoryTransport(), EarlySender(DEVICE)
    source, destination = pool(0.0), pool(-1.0)
    torch.cuda.synchronize()
    reader = torch.cuda.current_stream() if is_one_stream else torch.cuda.Stream()
    with torch.cuda.stream(reader):
        address = transport.receive_into(destination).address
    link = transport.connect(address, source)
    assert link.is_ordered == is_one_stream
    compute_and_send(source, link, sender, blocks, value=7.0, cycles=1)  # loads the kernels
    assert sender.end(link, timeout_s=5.0).wait(20)
    torch.cuda.synchronize()
    for layer in destination:
        layer.k.fill_(-1.0)
        layer.v.fill_(-1.0)
    torch.cuda.synchronize()
    last = compute_and_send(source, link, sender, blocks, value=1.0, cycles=SLOW_CYCLES)
    outcome = sender.end(link, timeout_s=5.0)
    assert outcome.is_done == is_one_stream
    assert not last.query(), "the host waited"
    assert outcome.wait(20)
    assert outcome.problem is None
    with torch.cuda.stream(reader):  # what a round would read
        found = [torch.stack((layer.k, layer.v))[:, list(blocks[1])] for layer in destination]
        rest = [torch.stack((layer.k, layer.v))[:, 7] for layer in destination]
    torch.cuda.synchronize()
    assert [bool((item == index + 1).all()) for index, item in enumerate(found)] == [True] * 3
    assert all(bool((item == -1).all()) for item in rest)
    sender.close()
