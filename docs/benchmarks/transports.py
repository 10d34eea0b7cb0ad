"""KV carriers against their libraries' own raw writes: 64 MiB between two processes on loopback.

    python docs/benchmarks/transports.py

Each carrier is timed in turns in one run: the library writes one buffer of 64 MiB, then the carrier
writes the same bytes as blocks of a pool (1,024 blocks of 64 KiB in two layers), once in order, as
a fresh pool gives them out, and once with no two neighbours on both sides. The ratios are those of
the medians. Needs the extras `nixl` or `mooncake`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from runtime.disagg.mooncake import MooncakeTransport, load_mooncake
from runtime.disagg.nixl import NixlTransport, load_nixl
from runtime.disagg.transport import BlockMove, Link, Transport
from runtime.kv import KVLayer
from specctl.contract.diagnostics import DiagnosticError

NUM_BYTES = 64 << 20
NUM_BLOCKS = 256  # two layers, keys and values: 1,024 pieces of 64 KiB
SHAPE = (NUM_BLOCKS, 8, 32, 128)


def make(name: str) -> Transport:
    """Return a carrier."""
    return NixlTransport() if name == "nixl" else MooncakeTransport()


def pool() -> tuple[KVLayer, ...]:
    """Return two layers, 64 MiB together."""
    return tuple(
        KVLayer(
            k=torch.ones(SHAPE, dtype=torch.bfloat16), v=torch.ones(SHAPE, dtype=torch.bfloat16)
        )
        for _ in range(2)
    )


def serve(name: str, pipe: Connection) -> None:
    """Offer a pool, and a raw buffer of the library."""
    transport = make(name)
    layers = pool()
    pipe.send(transport.receive_into(layers).address)
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    if name == "nixl":
        api = load_nixl()
        agent = api.nixl_agent("raw-target", api.nixl_agent_config(backends=["UCX"]))
        registered = agent.register_memory(buffer)
        descs = agent.get_serialized_descs(registered.trim())
        pipe.send((agent.get_agent_metadata(), descs))
    else:
        engine = load_mooncake().TransferEngine()
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        engine.register_memory(buffer.data_ptr(), NUM_BYTES)
        pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", buffer.data_ptr()))
    pipe.recv()


def raw_writer(name: str, place: Any) -> Callable[[], None]:
    """Return a function that writes 64 MiB as the library's own example does."""
    buffer = torch.ones(NUM_BYTES, dtype=torch.uint8)
    if name == "mooncake":
        segment, address = place
        engine = load_mooncake().TransferEngine()
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        engine.register_memory(buffer.data_ptr(), NUM_BYTES)

        def write_mooncake() -> None:
            status = engine.transfer_sync_write(segment, buffer.data_ptr(), address, NUM_BYTES)
            if status:
                raise SystemExit(f"mooncake ended with {status}")

        return write_mooncake
    metadata, descs = place
    api = load_nixl()
    agent = api.nixl_agent("raw-source", api.nixl_agent_config(backends=["UCX"]))
    local = agent.register_memory(buffer).trim()
    peer = agent.add_remote_agent(metadata)
    remote = agent.deserialize_descs(descs)

    def write_nixl() -> None:
        buffer.data_ptr()  # held by this function: a registration does not keep memory alive
        handle = agent.initialize_xfer("WRITE", local, remote, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"nixl ended as {state}")
        agent.release_xfer_handle(handle)

    return write_nixl


def carrier_writers(name: str, address: bytes) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that write the pool through the carrier: in order, and piece by piece."""
    layers = pool()
    link = make(name).connect(address, layers)
    blocks = tuple(range(NUM_BLOCKS))
    return (
        partial(write_blocks, link, blocks, layers),
        partial(write_blocks, link, blocks[::-1], layers),  # no neighbours on both sides
    )


def write_blocks(link: Link, source_blocks: tuple[int, ...], layers: tuple[KVLayer, ...]) -> None:
    """Write every block of all layers and wait for them."""
    for layer in range(len(layers)):
        link.write(
            BlockMove(
                source_layer=layer,
                destination_layer=layer,
                source_head=0,
                destination_head=0,
                num_heads=SHAPE[1],
                source_blocks=source_blocks,
                destination_blocks=tuple(range(NUM_BLOCKS)),
            )
        )
    link.finish(60)


def seconds(work: Callable[[], None]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, repeats: int) -> None:
    """Print the library's line and two of its carrier."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(name, theirs))
    process.start()
    in_order, scattered = carrier_writers(name, ours.recv())
    works = (raw_writer(name, ours.recv()), in_order, scattered)
    for work in works:
        work()
    rounds = [[seconds(work) for work in works] for _ in range(repeats)]
    ours.send(None)
    process.join()
    library, *own = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"{name}: library {1e3 * library:.1f} ms, {NUM_BYTES / library / 1e9:.2f} GB/s")
    for layout, taken in zip(("blocks in order", "scattered blocks"), own, strict=True):
        print(
            f"{name}: {layout} {1e3 * taken:.1f} ms, {NUM_BYTES / taken / 1e9:.2f} GB/s, "
            f"{taken / library:.2f} of the library"
        )


def main() -> None:
    """Measure every carrier whose library is installed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    for name in ("nixl", "mooncake"):
        try:
            load_nixl() if name == "nixl" else load_mooncake()
        except DiagnosticError as error:
            print(f"{name}: not measured, {error.diagnostics[0].found}")
            continue
        measure(name, repeats)


if __name__ == "__main__":
    main()
