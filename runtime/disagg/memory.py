"""Carriers within one machine: `memory` in one process, `shared` between processes.

`memory` waits for no copy where both sides launch on one CUDA stream: its order is enough.

`shared` maps POSIX shared memory where pools are on CPUs, and the memory of the GPU that both
processes use where they are on one (see `gpu_pools`). `memory` is the readable twin that tests
compare the others with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory

import msgspec
import torch

from runtime.config import DTYPES, dtype_name
from runtime.disagg.copies import BlockIndices, MappedLink, copy_blocks
from runtime.disagg.failures import carrier_failed
from runtime.disagg.gpu_pools import GpuAddress, GpuReceiver, open_pool
from runtime.disagg.transport import BlockMove, Link, Receiver
from runtime.kv import KVLayer, zeroed
from specctl.contract.diagnostics import DiagnosticError


class MemoryTransport:
    """Pools of one process; both sides hold the same object."""

    name = "memory"
    linger_s = 0.0

    def __init__(self) -> None:
        """Know no pool."""
        self._pools: dict[bytes, _Offered] = {}
        self._numbers = itertools.count()

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros: any memory of the process will do."""
        return zeroed(shape, dtype, device)

    def receive_into(self, layers: Sequence[KVLayer]) -> MemoryReceiver:
        """Offer a pool; the caller's stream is the one that will read it."""
        address = str(next(self._numbers)).encode()
        self._pools[address] = _Offered(layers=tuple(layers), stream=_stream_of(layers))
        return MemoryReceiver(address, self._pools)

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> MemoryLink:
        """Return a way into a pool that was offered; the caller's stream writes what is sent.

        Raises:
            DiagnosticError: SD863, no such pool.
        """
        if address not in self._pools:
            raise DiagnosticError(carrier_failed(self.name, "no pool has this address"))
        return MemoryLink(tuple(layers), address, self._pools)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offered:
    """A pool, and the stream on which its owner launches; None on a CPU."""

    layers: tuple[KVLayer, ...]
    stream: torch.cuda.Stream | None


def _stream_of(layers: Sequence[KVLayer]) -> torch.cuda.Stream | None:
    device = layers[0].k.device
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class MemoryReceiver:
    """A pool that was offered."""

    def __init__(self, address: bytes, pools: dict[bytes, _Offered]) -> None:
        """Stand for `pools[address]`."""
        self.address = address
        self._pools = pools

    def close(self) -> None:
        """Withdraw the pool."""
        self._pools.pop(self.address, None)


class MemoryLink:
    """Copies at once.

    Attributes:
        is_ordered: see `Link`; the streams are those of whoever offered the pool and connected.
    """

    def __init__(
        self,
        source: tuple[KVLayer, ...],
        address: bytes,
        pools: dict[bytes, _Offered],
    ) -> None:
        """Copy from `source` into `pools[address]`."""
        stream = _stream_of(source)
        self.is_ordered = stream is not None and stream == pools[address].stream
        self._source = source
        self._address = address
        self._pools = pools
        self._indices = BlockIndices()

    def write(self, move: BlockMove) -> None:
        """Copy; see `Link.write`."""
        pool = self._pools.get(self._address)
        if pool is None:
            raise DiagnosticError(carrier_failed("memory", "the pool was withdrawn"))
        copy_blocks(move, self._source, pool.layers, self._indices)

    def finish(self, timeout_s: float) -> None:
        """Wait for copies of a GPU whose order is not enough; those of a CPU are done."""
        del timeout_s  # a copy within a process cannot hang
        if self._source[0].k.is_cuda and not self.is_ordered:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Write nothing more."""
        self._source = ()


class _Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _Address(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """A pool in shared memory: keys and values of each layer in turn."""

    segments: list[_Segment]


class SharedTransport:
    """Between processes of one machine that may map each other's pools."""

    name = "shared"
    linger_s = 0.0

    def __init__(self) -> None:
        """Own no memory."""
        self._owned: dict[int, tuple[shared_memory.SharedMemory, _Segment]] = {}

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros in a segment of their own; on a GPU, where all memory can be mapped, zeros.

        Raises:
            DiagnosticError: SD863, the device has no memory that processes share.
        """
        if device.type == "cuda":
            return zeroed(shape, dtype, device)
        if device.type != "cpu":
            raise DiagnosticError(carrier_failed(self.name, f"a pool on {device}"))
        size = math.prod(shape) * dtype.itemsize
        memory = shared_memory.SharedMemory(create=True, size=max(size, 1))
        segment = _Segment(name=memory.name, dtype=dtype_name(dtype), shape=tuple(shape))
        tensor = _view(memory, segment)
        self._owned[tensor.data_ptr()] = (memory, segment)
        return tensor

    def receive_into(self, layers: Sequence[KVLayer]) -> Receiver:
        """Offer a pool whose tensors `allocate` made.

        Raises:
            DiagnosticError: SD863, a tensor lies elsewhere.
        """
        if layers[0].k.is_cuda:
            return GpuReceiver(layers)
        tensors = [tensor for layer in layers for tensor in (layer.k, layer.v)]
        if any(tensor.data_ptr() not in self._owned for tensor in tensors):
            raise DiagnosticError(carrier_failed(self.name, "a pool outside shared memory"))
        owned = [self._owned[tensor.data_ptr()] for tensor in tensors]
        return SharedReceiver([memory for memory, _ in owned], [segment for _, segment in owned])

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> Link:
        """Map a pool of another process.

        Raises:
            DiagnosticError: SD863, a segment is gone, or a GPU's memory cannot be mapped here.
        """
        found = msgspec.msgpack.decode(address, type=_Address | GpuAddress)
        if isinstance(found, GpuAddress):
            return MappedLink(self.name, tuple(layers), open_pool(found, layers[0].k.device))
        try:
            memories = [attach(segment.name) for segment in found.segments]
        except FileNotFoundError as error:
            raise DiagnosticError(carrier_failed(self.name, "a segment is gone")) from error
        views = [_view(m, s) for m, s in zip(memories, found.segments, strict=True)]
        pool = tuple(KVLayer(k=k, v=v) for k, v in zip(views[::2], views[1::2], strict=True))
        return MappedLink(self.name, tuple(layers), pool, mappings=memories)


class SharedReceiver:
    """A pool that was offered."""

    def __init__(
        self, memories: Sequence[shared_memory.SharedMemory], segments: Sequence[_Segment]
    ) -> None:
        """Stand for the segments of a pool."""
        self._memories = tuple(memories)
        self.address = msgspec.msgpack.encode(_Address(segments=list(segments)))

    def close(self) -> None:
        """Remove the names; memory goes when the last process lets go of it."""
        for memory in self._memories:
            memory.unlink()
        self._memories = ()


def attach(name: str) -> shared_memory.SharedMemory:
    """Map a segment of another process, which alone removes it.

    Before Python 3.13 attaching registers the segment with a tracker that removes it when this
    process ends, under the feet of its owner.
    """
    memory = shared_memory.SharedMemory(name=name)
    resource_tracker.unregister(f"/{name}", "shared_memory")
    return memory


def _view(memory: shared_memory.SharedMemory, segment: _Segment) -> torch.Tensor:
    dtype, count = DTYPES[segment.dtype], math.prod(segment.shape)
    return torch.frombuffer(memory.buf, dtype=dtype, count=count).view(segment.shape)
