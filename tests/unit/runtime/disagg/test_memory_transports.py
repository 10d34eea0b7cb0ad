"""Carriers within a machine: what is written is what was there, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context

import pytest
import torch

from runtime.disagg.memory import MemoryTransport, SharedTransport
from runtime.disagg.transport import BlockMove, Transport
from runtime.kv import KVLayer, KVLayerSpec, KVPool
from specctl.contract.diagnostics import DiagnosticError
from tests.rank_processes import LIMIT_S

CPU = torch.device("cpu")
MOVES = (
    BlockMove(
        source_layer=0,
        destination_layer=1,
        source_head=0,
        destination_head=2,
        num_heads=2,
        source_blocks=(3, 1),
        destination_blocks=(2, 5),
    ),
    BlockMove(
        source_layer=1,
        destination_layer=0,
        source_head=1,
        destination_head=0,
        num_heads=1,
        source_blocks=(4,),
        destination_blocks=(1,),
    ),
    BlockMove(
        source_layer=0,
        destination_layer=0,
        source_head=0,
        destination_head=1,
        num_heads=2,
        source_blocks=(0, 1, 2),
        destination_blocks=(5, 3, 4),
    ),
    BlockMove(
        source_layer=1,
        destination_layer=1,
        source_head=1,
        destination_head=0,
        num_heads=1,
        source_blocks=(5, 0, 2),
        destination_blocks=(1, 2, 3),
    ),
)


def source_pool() -> tuple[KVLayer, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (6, 2, 4, 8)
    return tuple(
        KVLayer(
            k=torch.randn(shape, generator=generator).to(torch.bfloat16),
            v=torch.randn(shape, generator=generator).to(torch.bfloat16),
        )
        for _ in range(2)
    )


@contextmanager
def destination_pool(transport: Transport) -> Iterator[tuple[KVLayer, ...]]:
    spec = KVLayerSpec(num_kv_heads=4, head_dim=8)
    yield KVPool(
        [spec, spec],
        num_blocks=6,
        kv_block_size=4,
        dtype=torch.bfloat16,
        device=CPU,
        allocate=transport.allocate,
    ).layers


def expected(source: Sequence[KVLayer]) -> list[torch.Tensor]:
    """Return the destination's keys and values after `MOVES`, block by block."""
    tensors = [torch.zeros(6, 4, 4, 8, dtype=torch.bfloat16) for _ in range(4)]
    for move in MOVES:
        for half, name in enumerate(("k", "v")):
            read = getattr(source[move.source_layer], name)
            written = tensors[2 * move.destination_layer + half]
            for block, goal in zip(move.source_blocks, move.destination_blocks, strict=True):
                for head in range(move.num_heads):
                    written[goal, move.destination_head + head] = read[
                        block, move.source_head + head
                    ]
    return tensors


def halves(layers: Sequence[KVLayer]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in (layer.k, layer.v)]


@pytest.mark.parametrize("make", [MemoryTransport, SharedTransport])
def test_moves_arrive_and_touch_nothing_else(
    make: type[MemoryTransport] | type[SharedTransport],
) -> None:
    transport = make()
    source = source_pool()
    with destination_pool(transport) as destination:
        receiver = transport.receive_into(destination)
        link = transport.connect(receiver.address, source)
        for move in MOVES:
            link.write(move)
        link.finish(5.0)
        for found, wanted in zip(halves(destination), expected(source), strict=True):
            assert torch.equal(found, wanted)
        link.close()
        receiver.close()
        with pytest.raises(DiagnosticError, match="SD863"):
            transport.connect(receiver.address, source)


def sender(address: bytes) -> None:
    link = SharedTransport().connect(address, source_pool())
    for move in MOVES:
        link.write(move)
    link.finish(5.0)
    link.close()


@pytest.mark.dist
def test_another_process_writes_into_shared_memory_and_leaves_it_there() -> None:
    transport = SharedTransport()
    with destination_pool(transport) as destination:
        receiver = transport.receive_into(destination)
        for _ in range(2):  # the segment outlives the first sender
            process = get_context("spawn").Process(target=sender, args=(receiver.address,))
            process.start()
            try:
                process.join(LIMIT_S)
                assert process.exitcode == 0
            finally:
                process.kill()
                process.join()
        for found, wanted in zip(halves(destination), expected(source_pool()), strict=True):
            assert torch.equal(found, wanted)
        receiver.close()


def test_shared_memory_offers_its_own_tensors_only() -> None:
    with pytest.raises(DiagnosticError, match="SD863") as caught:
        SharedTransport().receive_into(source_pool())
    assert caught.value.diagnostics[0].found == "a pool outside shared memory"


def test_bytes_follow_the_formula() -> None:
    layer = source_pool()[0]
    # 2 (keys, values) x 2 heads x 4 tokens x 8 numbers x 2 bytes x 2 blocks
    assert MOVES[0].num_bytes(layer) == 2 * 2 * 4 * 8 * 2 * 2
