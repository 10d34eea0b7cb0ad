"""Several tensors in one buffer of bytes: one copy or one transfer for a whole message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

Described: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""
_ALIGNMENT = 256  # bytes; vector loads of every kernel


def described(tensors: Sequence[torch.Tensor]) -> list[Described]:
    """Return type and shape of each tensor."""
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


def packed_bytes(parts: Sequence[Described]) -> int:
    """Return the bytes of a buffer that holds these tensors."""
    return sum(_padded_bytes(part) for part in parts)


def views_of(buffer_N: torch.Tensor, parts: Sequence[Described]) -> tuple[torch.Tensor, ...]:
    """Return tensors that lie one after the other in a buffer.

    Args:
        buffer_N: uint8, `packed_bytes(parts)` long or longer.
        parts: what they are.
    """
    starts = itertools.accumulate(map(_padded_bytes, parts), initial=0)
    return tuple(
        buffer_N[start : start + _bytes(part)].view(part[0]).view(part[1])
        for part, start in zip(parts, starts, strict=False)  # the last start is the end
    )


def _bytes(part: Described) -> int:
    dtype, shape = part
    return math.prod(shape) * dtype.itemsize


def _padded_bytes(part: Described) -> int:
    return -(-_bytes(part) // _ALIGNMENT) * _ALIGNMENT
