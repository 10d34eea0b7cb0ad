"""The carrier `shared` where both pools are on one GPU: one process maps the other's pool.

Copies run on the sender's stream; a finished transfer is one that the device has done, so what the
receiver launches after it is told reads the copied blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from runtime.config import DTYPES, dtype_name
from runtime.disagg.failures import carrier_failed
from runtime.kv import KVLayer
from runtime.parallel.gpu_memory import gpu_name, open_memory, share_memory
from runtime.parallel.lost import first_line
from specctl.contract.diagnostics import DiagnosticError

_NAME = "shared"


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
