"""Launches of one kernel outside of graphs, again and again, at little cost for the host.

A launch through `kernel[grid]` binds its arguments and looks the binary up each time, which takes
the host longer than the launch itself. Rounds do that in graphs, where it is paid once; what is
launched beside them is bound once here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def relaunch(
    kernel: Any,
    arguments: Sequence[torch.Tensor | int],
    constants: Mapping[str, int | bool],
    *,
    num_programs: int,
    num_warps: int,
) -> Callable[..., None]:
    """Launch a kernel once, and return what launches it with other arguments.

    Args:
        kernel: the Triton function; compiles the same whatever its numbers are
            (`do_not_specialize`).
        arguments: of the launch that is made here, which compiles: tensors, then numbers. Tensors
            of later ones have their dtypes and begin at multiples of 16 bytes, too; CPU ones are
            pinned.
        constants: compile-time arguments.
        num_programs: of every launch.
        num_warps: of a program.

    Returns:
        Takes `arguments`; launches on the current stream.
    """
    grid = (num_programs, 1, 1)
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors), "binaries assume alignment"
    compiled = kernel[grid](*arguments, **constants, num_warps=num_warps)
    if compiled is None:  # the interpreter compiles nothing

        def interpret(*others: torch.Tensor | int) -> None:
            kernel[grid](*others, **constants, num_warps=num_warps)

        return interpret
    numbers = kernel.params[len(tensors) : len(arguments)]
    assert all(number.do_not_specialize for number in numbers), "numbers change between launches"
    fixed = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    run = compiled[grid]

    def launch(*others: torch.Tensor | int) -> None:
        run(*others, *fixed)

    return launch
