"""The paged KV pool: one pair of tensors per layer, addressed by block id.

Layout per layer: k, v [num_blocks, num_kv_heads, kv_block_size, head_dim]. Target layers come
first, the draft's layers after them; all share one block table per request. Memory is zeroed so
that unread slots are finite (0 * NaN would poison masked attention).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Makes a zeroed tensor of a shape, dtype and device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayerSpec:
    """Heads and head size of one layer's cache."""

    num_kv_heads: int
    head_dim: int

    def block_bytes(self, kv_block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values together."""
        return 2 * self.num_kv_heads * kv_block_size * self.head_dim * dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayer:
    """One layer's cache, k and v [num_blocks, num_kv_heads, kv_block_size, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


class KVPool:
    """Owns the cache memory of target and draft layers."""

    def __init__(
        self,
        layers: Sequence[KVLayerSpec],
        *,
        num_blocks: int,
        kv_block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
    ) -> None:
        """Allocate and zero `num_blocks` blocks for every layer.

        Args:
            layers: needs of each layer.
            num_blocks: of every layer.
            kv_block_size: tokens of a block.
            dtype: of keys and values.
            device: where they lie.
            allocate: makes the tensors; None: `zeroed`.
        """
        make = zeroed if allocate is None else allocate
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self.layers: tuple[KVLayer, ...] = tuple(
            KVLayer(k=make(shape, dtype, device), v=make(shape, dtype, device))
            for shape in (
                (num_blocks, spec.num_kv_heads, kv_block_size, spec.head_dim) for spec in layers
            )
        )


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU the pages are the system's, which come into being when first used.

    `torch.zeros` would write every byte: seconds and gigabytes for a pool that a short run hardly
    touches.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
