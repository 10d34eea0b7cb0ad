"""NIXL and Mooncake between two processes on loopback: bits, refusals, a peer that is killed."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from runtime.disagg.mooncake import MooncakeTransport
from runtime.disagg.nixl import NixlTransport
from runtime.disagg.transport import BlockMove, Link, Transport
from runtime.kv import KVLayer
from specctl.contract.diagnostics import DiagnosticError

pytestmark = pytest.mark.dist

MODULES = {
    "nixl": ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"),
    "mooncake": ("mooncake.engine",),
}
NUM_LAYERS, SHAPE = 3, (8, 2, 4, 16)
MOVE = BlockMove(
    source_layer=2,
    destination_layer=0,
    source_head=1,
    destination_head=0,
    num_heads=1,
    source_blocks=(1, 2, 5),
    destination_blocks=(3, 4, 0),
)


def is_installed(name: str) -> bool:
    for module in MODULES[name]:
        try:
            importlib.import_module(module)
        except ImportError:
            continue
        return True
    return False


def transports() -> list[object]:
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not is_installed(name), reason=f"extra `{name}` is not installed here"
            ),
        )
        for name in MODULES
    ]


def make(name: str) -> Transport:
    return NixlTransport() if name == "nixl" else MooncakeTransport()


def pool(transport: Transport, value: float) -> tuple[KVLayer, ...]:
    layers = []
    for index in range(NUM_LAYERS):
        keys, values = (
            transport.allocate(SHAPE, torch.bfloat16, torch.device("cpu")) for _ in range(2)
        )
        keys.copy_(torch.arange(keys.numel()).view(SHAPE) % 97 + value + index)
        values.copy_(-keys)
        layers.append(KVLayer(k=keys, v=values))
    return tuple(layers)


def receiver(name: str, pipe: Connection) -> None:
    """Offer a pool of zeros; answer with its bytes when asked."""
    transport = make(name)
    layers = pool(transport, 0)
    for layer in layers:
        layer.k.zero_()
        layer.v.zero_()
    offered = transport.receive_into(layers)
    pipe.send(offered.address)
    while pipe.recv():
        pipe.send([(layer.k.float().numpy(), layer.v.float().numpy()) for layer in layers])


def expected(source: Sequence[KVLayer]) -> torch.Tensor:
    keys = torch.zeros(SHAPE)
    for block, goal in zip(MOVE.source_blocks, MOVE.destination_blocks, strict=True):
        keys[goal, 0] = source[2].k[block, 1].float()
    return keys


@pytest.mark.parametrize("name", transports())
def test_bits_arrive_and_a_killed_peer_is_a_code(name: str) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(name, theirs), daemon=True)
    process.start()
    assert ours.poll(120), "the receiver did not start"
    address = ours.recv()
    transport = make(name)
    source = pool(transport, 3)
    link = transport.connect(address, source)
    link.write(MOVE)
    link.finish(20)
    ours.send(True)
    found = ours.recv()
    assert torch.equal(torch.from_numpy(found[0][0]), expected(source))
    assert torch.equal(torch.from_numpy(found[0][1]), -expected(source))
    assert not any(part.any() for layer in found[1:] for part in layer)

    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(20)
    with pytest.raises(DiagnosticError) as caught:
        write_until_it_fails(link)
    assert {problem.code for problem in caught.value.diagnostics} == {"SD863"}


def write_until_it_fails(link: Link) -> None:
    for _ in range(50):
        link.write(MOVE)
        link.finish(5)
