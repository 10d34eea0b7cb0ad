"""The `mooncake` carrier: one-sided writes through Mooncake's transfer engine.

*Source:* mooncake-transfer-engine 0.3.13 (`TransferEngine`): peer-to-peer handshake, no metadata
server; a call returns 0 when all bytes are there, anything else is a failure. On a dead network it
returns after 30 s; bytes that were under way arrive when the network is back before that.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from runtime.disagg.failures import carrier_failed
from runtime.disagg.ranges import LayerPlace, byte_ranges, places_of
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer, zeroed
from specctl.contract.diagnostics import DiagnosticError


class _Address(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a pool."""

    segment: str
    layers: list[LayerPlace]


def load_mooncake() -> Any:
    """Return Mooncake's engine module.

    Raises:
        DiagnosticError: SD863, it is not installed or lacks a system library.
    """
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise DiagnosticError(
            carrier_failed(
                "mooncake",
                str(error),
                help="`pip install 'specctl[mooncake]'`, and the system's libibverbs",
            )
        ) from error


class MooncakeTransport:
    """One transfer engine for all pools and links of a process."""

    name = "mooncake"
    linger_s = 30.0  # its connections end after that without progress

    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp") -> None:
        """Start an engine.

        Args:
            host: address at which peers reach this process.
            protocol: `tcp` or `rdma`.

        Raises:
            DiagnosticError: SD863, the package is not installed or the engine does not start.
        """
        self._engine = load_mooncake().TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise DiagnosticError(carrier_failed("mooncake", f"no engine on {host}"))
        self._segment = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: set[int] = set()

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros: any memory can be registered."""
        return zeroed(shape, dtype, device)

    def receive_into(self, layers: Sequence[KVLayer]) -> MooncakeReceiver:
        """Register a pool and offer it."""
        places = self._register(layers)
        address = _Address(segment=self._segment, layers=places)
        return MooncakeReceiver(msgspec.msgpack.encode(address))

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> MooncakeLink:
        """Return a way into the pool of another process; the first write finds out if it is up."""
        found = msgspec.msgpack.decode(address, type=_Address)
        self._register(layers)
        return MooncakeLink(self._engine, found.segment, tuple(layers), found.layers)

    def _register(self, layers: Sequence[KVLayer]) -> list[LayerPlace]:
        places = places_of(layers)
        for place in places:
            for begin in (place.keys, place.values):
                if begin in self._registered:
                    continue
                if self._engine.register_memory(begin, place.num_bytes):
                    raise DiagnosticError(
                        carrier_failed("mooncake", f"{place.num_bytes} bytes do not register")
                    )
                self._registered.add(begin)
        return places


class MooncakeReceiver:
    """A registered pool."""

    def __init__(self, address: bytes) -> None:
        """Stand for a pool."""
        self.address = address

    def close(self) -> None:
        """Leave the memory registered: the engine lets go of it when the process ends."""


class MooncakeLink:
    """Writes from one pool into one of another process, each write to its end."""

    is_ordered = False

    def __init__(
        self,
        engine: Any,
        segment: str,
        layers: tuple[KVLayer, ...],
        destination: list[LayerPlace],
    ) -> None:
        """Write `layers` into a segment."""
        self._engine = engine
        self._segment = segment
        self._layers = layers  # a registration does not keep its memory alive
        self._source = places_of(layers)
        self._destination = destination

    def write(self, move: BlockMove) -> None:
        """Write and wait; see `Link.write`."""
        ranges = byte_ranges(
            move, self._source[move.source_layer], self._destination[move.destination_layer]
        )
        reads, writes, lengths = (list(column) for column in zip(*ranges, strict=True))
        if self._engine.batch_transfer_sync_write(self._segment, reads, writes, lengths):
            raise DiagnosticError(carrier_failed("mooncake", f"{self._segment} takes no writes"))

    def finish(self, timeout_s: float) -> None:
        """Return: every write was waited for."""
        del timeout_s

    def close(self) -> None:
        """Nothing is kept open."""
