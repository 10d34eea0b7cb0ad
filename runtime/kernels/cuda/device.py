"""What a launcher needs to know of the device it runs on."""

from __future__ import annotations

import functools

import torch

from runtime.kernels.tile_rules import Overlap

_OVERLAP_CODES: dict[Overlap, int] = {"never": 0, "leads": 1, "at once": 1, "started": 2}
"""What kernels compare: when they let their successor start."""


_INTERPRETER_ARCH = 90
_OVERLAP_ARCH = 90  # programmatic dependent launch exists from here on

IS_OVERLAPPING = True
"""Whether kernels that can start while their predecessor ends do so; bits do not depend on it.

A kernel launched so may run beside any kernel before it until its wait (`gdc_wait`) returns: then
all of them have ended and their results are visible. Three rules keep that safe:

1. Before its wait a kernel writes nothing, and reads only what no launch of the same forward
   writes: weights, rotary tables, positions, slots, block tables, and keys of earlier forwards.
   What it writes afterwards may have been an input of the kernel before, which has ended by then.
2. A kernel that may begin a forward (the entry into the stream, a plain or joined product, or a
   library kernel, which never overlaps) lets its successors start only after its own wait. So
   whatever starts within a forward finds everything that was launched before the forward complete.
   `prepare_round` writes positions, slots and tables, and lets nobody start before it ends.
3. At least one program of every such launch waits. A launch ends after all its programs, so the
   end of one launch implies the end of all before it, and a wait for the last is a wait for all.
"""


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


def overlap_options(
    device: torch.device, overlap: bool | None, own: Overlap = "at once"
) -> tuple[int, dict[str, bool]]:
    """Return how a launch overlaps its neighbours, and the launch options that say so.

    The number is 0 without overlap, 1 where the successor may start at once, 2 where it may once
    the kernel has waited: kernels compare it.

    Args:
        device: of the launch; programs under the interpreter never overlap.
        overlap: whether launches overlap at all; None takes the choice of this module.
        own: of the kernel.
    """
    wanted = IS_OVERLAPPING if overlap is None else overlap
    is_possible = device.type == "cuda" and device_arch(device) >= _OVERLAP_ARCH
    if not (wanted and is_possible and own != "never"):
        return 0, {}
    return _OVERLAP_CODES[own], {} if own == "leads" else {"launch_pdl": True}
