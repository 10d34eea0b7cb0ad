"""What a launcher needs to know of the device it runs on."""

from __future__ import annotations

import functools

import torch

_INTERPRETER_ARCH = 90


@functools.lru_cache(maxsize=64)
def device_arch(device: torch.device) -> int:
    """Return the compute capability as major * 10 + minor; CPU tensors mean the interpreter."""
    if device.type != "cuda":
        return _INTERPRETER_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor with unit stride in its last dimension, copying only if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def power_of_two(count: int, *, at_least: int = 1) -> int:
    """Return the smallest power of two that is no less than both arguments."""
    return max(1 << (count - 1).bit_length(), at_least)


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of `size` hold `count`."""
    return -(-count // size)
