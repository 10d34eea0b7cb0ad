"""Channels: threads and processes carry the same message; a lost peer is a code, not a wait."""

from __future__ import annotations

from multiprocessing.queues import Queue

import pytest
import torch

from runtime.parallel.channels import DistributedChannel, header_of, parse_header
from runtime.parallel.ranks import DistributedRanks, ThreadExchange, rank_sum
from specctl.contract.diagnostics import DiagnosticError
from tests.queue_channel import QueueChannel
from tests.rank_processes import LIMIT_S, join_group, two_processes

CPU = torch.device("cpu")
MESSAGE = (
    torch.arange(12, dtype=torch.int64).view(3, 4),
    torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    torch.empty(0, 7),
    torch.tensor(3.5),
)


def same(found: tuple[torch.Tensor, ...]) -> bool:
    return len(found) == len(MESSAGE) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, MESSAGE, strict=True)
    )


def test_threads_hand_over_copies() -> None:
    channel = QueueChannel(timeout_s=5)
    buffer = torch.ones(3)
    channel.send([buffer])
    buffer.zero_()
    assert channel.receive()[0].tolist() == [1, 1, 1]


def test_a_silent_peer_of_a_thread() -> None:
    with pytest.raises(DiagnosticError, match="SD855"):
        QueueChannel(timeout_s=0.01).receive()


def test_a_header_describes_its_tensors() -> None:
    expected = [(tensor.dtype, tuple(tensor.shape)) for tensor in MESSAGE]
    assert parse_header(header_of(MESSAGE)) == expected


@pytest.mark.parametrize("header", [[17], [-1], [1, 9, 1, 1, 0, 0, 0], [1, 0, 5, 1, 1, 1, 1]])
def test_numbers_that_are_no_header(header: list[int]) -> None:
    padded = header + [0] * (len(header_of(())) - len(header))
    with pytest.raises(DiagnosticError, match="SD853"):
        parse_header(padded)


def partial(rank: int) -> torch.Tensor:
    scale = torch.tensor([10.0**power for power in range(-4, 4)])
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank)) * scale


def process(rank: int, port: int, out: Queue[tuple[int, object]]) -> None:
    """Rank 0 sends and is gone; rank 1 receives twice; both add their partials."""
    group = join_group(rank, port)
    channel = DistributedChannel(group, 1 - rank, device=CPU)
    total = rank_sum(DistributedRanks(group), partial(rank)).tolist()
    if rank == 0:
        channel.send(MESSAGE)
        channel.flush()
        out.put((rank, total))
        return
    out.put((rank, total))
    out.put((rank, same(channel.receive())))
    try:
        channel.receive()
    except DiagnosticError as error:
        out.put((rank, error.diagnostics[0].code))


@pytest.mark.dist
def test_processes_hand_over_add_and_notice_a_loss() -> None:
    with two_processes(process) as out:
        results = [out.get(timeout=LIMIT_S) for _ in range(4)]
    one, two = ThreadExchange(2).ranks()
    assert (one.size, two.size) == (2, 2)
    expected = (partial(0) + partial(1)).tolist()
    assert (
        sorted(value == expected for _, value in results if isinstance(value, list)) == [True] * 2
    )
    assert [value for rank, value in results if rank == 1 and not isinstance(value, list)] == [
        True,
        "SD855",
    ]
