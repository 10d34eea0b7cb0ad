"""The carrier `shared` where both pools are on one GPU: one process maps the other's pool.

Copies run on the sender's stream; a finished transfer is one that the device has done, so what the
receiver launches after it is told reads the copied blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch

from runtime.config import DTYPES, dtype_name
from runtime.disagg.copies import BlockIndices, copy_blocks
from runtime.disagg.failures import carrier_failed
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer
from runtime.parallel.gpu_memory import gpu_name, open_memory, share_memory
from runtime.parallel.lost import first_line
from specctl.contract.diagnostics import DiagnosticError

_NAME = "shared"
_POLL_S = 20e-6


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a GPU's memory."""

    note: bytes
    dtype: str
    shape: tuple[int, ...]


class GpuAddress(msgspec.Struct, frozen=True, kw_only=True, tag="gpu"):
    """A pool in a GPU's memory: keys and values of each layer in turn."""

    gpu: str
    tensors: list[_Tensor]


class GpuReceiver:
    """A pool that was offered."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        """Offer layers of one GPU, each tensor the whole of its storage."""
        tensors = [
            _Tensor(
                note=share_memory(tensor),
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
            )
            for layer in layers
            for tensor in (layer.k, layer.v)
        ]
        name = gpu_name(layers[0].k.device)
        self.address = msgspec.msgpack.encode(GpuAddress(gpu=name, tensors=tensors))

    def close(self) -> None:
        """Do nothing: mappings end with the processes that hold them."""


def open_pool(address: GpuAddress, device: torch.device) -> tuple[KVLayer, ...]:
    """Map a pool of another process.

    Args:
        address: of the pool.
        device: of the pool that is read.

    Raises:
        DiagnosticError: SD863, the pool is on another GPU, or cannot be mapped.
    """
    if gpu_name(device) != address.gpu:
        raise DiagnosticError(
            carrier_failed(
                _NAME,
                f"pools on two GPUs, {gpu_name(device) or 'none'} and {address.gpu}",
                help="Use `--transport nixl` or `mooncake` between GPUs",
            )
        )
    try:
        views = [
            open_memory(item.note, device).view(DTYPES[item.dtype]).view(item.shape)
            for item in address.tensors
        ]
    except RuntimeError as error:
        found = f"CUDA IPC was refused: {first_line(error)}"
        raise DiagnosticError(carrier_failed(_NAME, found)) from error
    return tuple(KVLayer(k=k, v=v) for k, v in zip(views[::2], views[1::2], strict=True))


class GpuLink:
    """Copies on the current stream of the thread that writes."""

    def __init__(self, source: tuple[KVLayer, ...], destination: tuple[KVLayer, ...]) -> None:
        """Copy from `source` into `destination`, both on one GPU."""
        self._source = source
        self._destination = destination
        self._indices = BlockIndices()

    def write(self, move: BlockMove) -> None:
        """Launch the copy; see `Link.write`."""
        copy_blocks(move, self._source, self._destination, self._indices)

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies; see `Link.finish`."""
        stream = torch.cuda.current_stream()
        end = time.monotonic() + timeout_s
        while not stream.query():
            if time.monotonic() > end:
                raise DiagnosticError(carrier_failed(_NAME, f"no end within {timeout_s:g} s"))
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Let go of the mapping."""
        self._destination = ()
        self._source = ()
