"""Outcomes of a round on CUDA: one kernel that writes pinned memory of the host itself.

A copy of a few hundred bytes by the copy engine costs the device more than a kernel of one program.
The end of the kernel makes its writes visible to the host, as it does to the device.

Legend: B requests, X columns of the output, G drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div
from runtime.kernels.cuda.relaunch import relaunch
from runtime.kernels.outcomes import OutcomeTensors

STORE_BLOCK = 512  # numbers of a program: one program for the rounds of tens of requests
STORE_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def store_outcomes_kernel(
    output_ptr, counted_ptr, chances_ptr, host_output_ptr, host_counted_ptr, host_chances_ptr,
    num_rows,
    COLUMNS: tl.constexpr, COUNTED: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK numbers of each tensor, of the first rows; all is read before any is written."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_output = lanes < num_rows * COLUMNS
    is_count = lanes < num_rows
    is_chance = lanes < num_rows * DRAFTS
    output = tl.load(output_ptr + lanes, mask=is_output)
    if COUNTED:
        counted = tl.load(counted_ptr + lanes, mask=is_count)
    if DRAFTS:
        chances = tl.load(chances_ptr + lanes, mask=is_chance)
    tl.store(host_output_ptr + lanes, output, mask=is_output)
    if COUNTED:
        tl.store(host_counted_ptr + lanes, counted, mask=is_count)
    if DRAFTS:
        tl.store(host_chances_ptr + lanes, chances, mask=is_chance)


def prepare_outcome_store(source: OutcomeTensors, target: OutcomeTensors) -> Callable[[int], None]:
    """Prepare the launches of `outcome_store`."""
    output_BX, confidence_BG = source.output_BX, source.confidence_BG
    num_drafts = 0 if confidence_BG is None else confidence_BG.shape[1]
    assert num_drafts < output_BX.shape[1], "programs cover the output"
    tensors = (*_with_stand_ins(source), *_with_stand_ins(target))
    launch = relaunch(
        store_outcomes_kernel,
        (*tensors, 0),
        store_constants(
            output_BX.shape[1],
            num_drafts=num_drafts,
            has_counts=source.num_counted_B is not None,
        ),
        num_programs=max(1, ceil_div(output_BX.numel(), STORE_BLOCK)),
        num_warps=STORE_WARPS,
    )

    def store(num_rows: int) -> None:
        launch(*tensors, num_rows)

    return store


def store_constants(
    num_columns: int, *, num_drafts: int, has_counts: bool
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `store_outcomes_kernel`."""
    return {
        "COLUMNS": num_columns,
        "COUNTED": has_counts,
        "DRAFTS": num_drafts,
        "BLOCK": STORE_BLOCK,
    }


def _with_stand_ins(outcome: OutcomeTensors) -> tuple[torch.Tensor, ...]:
    """Return all three, the output in place of those that do not exist."""
    all_of_them = (outcome.output_BX, outcome.num_counted_B, outcome.confidence_BG)
    return tuple(outcome.output_BX if tensor is None else tensor for tensor in all_of_them)
