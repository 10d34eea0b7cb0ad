"""The `nixl` carrier: one-sided writes through NIXL's UCX backend.

*Source:* nixl 1.5 Python API (`nixl_agent`): metadata and descriptors may travel over any channel,
so no listener of its own is opened. The receiver learns nothing of a write.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from runtime.disagg.failures import carrier_failed
from runtime.disagg.ranges import LayerPlace, byte_ranges, places_of
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer, zeroed
from specctl.contract.diagnostics import DiagnosticError

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_POLL_S = 20e-6


class _Address(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a pool."""

    metadata: bytes
    layers: list[LayerPlace]


def load_nixl() -> Any:
    """Return NIXL's Python module.

    Raises:
        DiagnosticError: SD863, it is not installed.
    """
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise DiagnosticError(
        carrier_failed(
            "nixl", "the package `nixl` is not installed", help="`pip install 'specctl[nixl]'`"
        )
    )


def library_errors(api: Any) -> tuple[type[Exception], ...]:
    """Return what calls of NIXL raise; the exceptions of its binding share no base class.

    Args:
        api: its Python module, which the meta package may have from another one.
    """
    package = str(api.nixl_agent.__module__).rpartition(".")[0]
    binding = vars(importlib.import_module(f"{package}._bindings"))
    own = [
        item for item in binding.values() if isinstance(item, type) and issubclass(item, Exception)
    ]
    return (RuntimeError, *own)


class NixlTransport:
    """One NIXL agent for all pools and links of a process."""

    name = "nixl"
    linger_s = 10.0

    def __init__(self) -> None:
        """Start an agent.

        Raises:
            DiagnosticError: SD863, the package is not installed.
        """
        # Without it bytes wait in a dead connection for as long as the system tries, a quarter of
        # an hour, and arrive in blocks that have long had another use.
        os.environ["UCX_TCP_USER_TIMEOUT"] = f"{self.linger_s:g}s"
        self._api = load_nixl()
        self._errors = library_errors(self._api)
        config = self._api.nixl_agent_config(backends=["UCX"])
        self._agent = self._api.nixl_agent(f"specctl-{uuid.uuid4().hex}", config)
        self._registered: dict[int, Any] = {}

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros: any memory can be registered."""
        return zeroed(shape, dtype, device)

    def receive_into(self, layers: Sequence[KVLayer]) -> NixlReceiver:
        """Register a pool and offer it."""
        self._register(layers)
        address = _Address(metadata=self._agent.get_agent_metadata(), layers=places_of(layers))
        return NixlReceiver(msgspec.msgpack.encode(address))

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> NixlLink:
        """Return a way into the pool of another process.

        Raises:
            DiagnosticError: SD863, the agent at the address cannot be reached.
        """
        found = msgspec.msgpack.decode(address, type=_Address)
        self._register(layers)
        try:
            peer = self._agent.add_remote_agent(found.metadata)
        except self._errors as error:
            raise DiagnosticError(carrier_failed("nixl", str(error))) from error
        return NixlLink(self._agent, peer, tuple(layers), found.layers, errors=self._errors)

    def _register(self, layers: Sequence[KVLayer]) -> None:
        for layer in layers:
            for tensor in (layer.k, layer.v):
                if tensor.data_ptr() not in self._registered:
                    self._registered[tensor.data_ptr()] = self._agent.register_memory(tensor)


class NixlReceiver:
    """A registered pool."""

    def __init__(self, address: bytes) -> None:
        """Stand for a pool."""
        self.address = address

    def close(self) -> None:
        """Leave the memory registered: the agent deregisters it when the process ends."""


class NixlLink:
    """Writes from one pool into one of another process."""

    is_ordered = False

    def __init__(
        self,
        agent: Any,
        peer: str,
        layers: tuple[KVLayer, ...],
        destination: list[LayerPlace],
        *,
        errors: tuple[type[Exception], ...],
    ) -> None:
        """Write `layers` as `agent` into memory of `peer`; `errors` are what its calls raise."""
        self._errors = errors
        self._agent = agent
        self._peer = peer
        self._layers = layers  # a registration does not keep its memory alive
        self._source = places_of(layers)
        self._destination = destination
        self._handles: list[Any] = []

    def write(self, move: BlockMove) -> None:
        """Start one transfer; see `Link.write`."""
        source, goal = self._source[move.source_layer], self._destination[move.destination_layer]
        ranges = byte_ranges(move, source, goal)
        local = [(read, length, source.device or 0) for read, _, length in ranges]
        remote = [(written, length, goal.device or 0) for _, written, length in ranges]
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, _kind(source)),
                self._agent.get_xfer_descs(remote, _kind(goal)),
                self._peer,
            )
            self._handles.append(handle)
            state = self._agent.transfer(handle)
        except self._errors as error:
            raise DiagnosticError(carrier_failed("nixl", str(error))) from error
        if state == "ERR":
            raise DiagnosticError(carrier_failed("nixl", "a transfer ended in an error"))

    def finish(self, timeout_s: float) -> None:
        """Poll every transfer; see `Link.finish`."""
        limit = time.monotonic() + timeout_s
        handles, self._handles = self._handles, []
        try:
            for handle in handles:
                self._wait(handle, limit)
        finally:
            for handle in handles:
                self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Forget the peer."""
        self._agent.remove_remote_agent(self._peer)

    def _wait(self, handle: Any, limit: float) -> None:
        while (state := self._state(handle)) == "PROC":
            if time.monotonic() > limit:
                raise DiagnosticError(carrier_failed("nixl", "a transfer took too long"))
            time.sleep(_POLL_S)
        if state != "DONE":
            raise DiagnosticError(carrier_failed("nixl", f"a transfer ended as {state}"))

    def _state(self, handle: Any) -> str:
        try:
            return str(self._agent.check_xfer_state(handle))
        except self._errors as error:
            raise DiagnosticError(carrier_failed("nixl", str(error))) from error


def _kind(place: LayerPlace) -> str:
    return "DRAM" if place.device is None else "VRAM"
