"""Time a barrier of a whole grid: what a kernel that walks all layers would pay between products.

One program on each multiprocessor; every barrier counts arrivals in one integer and polls it. The
log says what the figure decides: below 0.5 us a barrier such a kernel would beat dependent
launches, whose empty node takes 0.75 us.

    python docs/benchmarks/experiments/grid_barrier.py
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

_ROUNDS = (100, 1_100)
_REPEATS = 7


@triton.jit
def _poll(pointer):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def barrier_kernel(
    counter_ptr, x_ptr, num_rounds,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803  constants of Triton
):  # fmt: skip
    """Write a line, wait for all programs, read the neighbour's line; as often as asked."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    value = lanes + program
    for number in range(num_rounds):
        tl.store(x_ptr + program * BLOCK + lanes, value)
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")
        wanted = (number + 1) * PROGRAMS
        while _poll(counter_ptr) < wanted:
            pass
        tl.debug_barrier()
        neighbour = (program + 1) % PROGRAMS
        value += tl.load(x_ptr + neighbour * BLOCK + lanes, cache_modifier=".cg")
        tl.debug_barrier()


def main() -> None:
    """Print microseconds a barrier for several sizes of a grid."""
    for programs in (32, 64, 132):
        x = torch.zeros(programs * 64, dtype=torch.int32, device="cuda")
        times = []
        for rounds in _ROUNDS:
            found = []
            for _ in range(_REPEATS):
                counter = torch.zeros(1, dtype=torch.int32, device="cuda")
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                barrier_kernel[(programs,)](counter, x, rounds, PROGRAMS=programs, BLOCK=64)
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) * 1000)
            times.append(sorted(found)[_REPEATS // 2])
        each = (times[1] - times[0]) / (_ROUNDS[1] - _ROUNDS[0])
        sys.stdout.write(f"{programs} programs: {each:.2f} us a barrier\n")


if __name__ == "__main__":
    main()
