"""What the host hands rounds on CUDA: kernels of one program that read pinned memory themselves.

They write what the kernels of the next round read: nobody starts before they end.

Legend: S slots, T blocks of a table, B requests and padding, C numbers that an entry has room for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import power_of_two
from runtime.kernels.cuda.relaunch import relaunch
from runtime.kernels.round_inputs import Put

PUT_WARPS = 4


@triton.jit(do_not_specialize=["num_cells"])
def put_blocks_kernel(
    entry_ptr, table_ptr, num_cells, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the blocks of an entry to their places."""
    lanes = tl.arange(0, BLOCK)
    mask = lanes < num_cells
    places = tl.load(entry_ptr + lanes, mask=mask, other=0)
    blocks = tl.load(entry_ptr + CAPACITY + lanes, mask=mask, other=0)
    tl.store(table_ptr + places, blocks, mask=mask)


@triton.jit(do_not_specialize=["num_requests", "num_lanes", "padding_slot"])
def put_batch_kernel(
    entry_ptr, slots_ptr, num_drafts_ptr, num_requests, num_lanes, padding_slot,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write slots and drafts of an entry, then padding."""
    lanes = tl.arange(0, BLOCK)
    mask = lanes < num_lanes
    is_real = lanes < num_requests
    slots = tl.load(entry_ptr + lanes, mask=is_real, other=0)
    counts = tl.load(entry_ptr + CAPACITY + lanes, mask=is_real, other=0)
    slots = tl.where(is_real, slots, padding_slot)
    tl.store(slots_ptr + lanes, slots.to(tl.int64), mask=mask)
    tl.store(num_drafts_ptr + lanes, counts.to(tl.int64), mask=mask)


def prepare_block_put(table_ST: torch.Tensor, entry_2C: torch.Tensor) -> Put:
    """Prepare the launches of `block_put`."""
    launch = relaunch(
        put_blocks_kernel,
        (entry_2C, table_ST, 0),
        entry_constants(entry_2C.shape[1]),
        num_programs=1,
        num_warps=PUT_WARPS,
    )

    def put(entry_2C: torch.Tensor, num_cells: int) -> None:
        launch(entry_2C, table_ST, num_cells)

    return put


def prepare_batch_put(
    slots_B: torch.Tensor, num_drafts_B: torch.Tensor, entry_2C: torch.Tensor, padding_slot: int
) -> Put:
    """Prepare the launches of `batch_put`."""
    num_lanes = slots_B.shape[0]
    launch = relaunch(
        put_batch_kernel,
        (entry_2C, slots_B, num_drafts_B, 0, num_lanes, padding_slot),
        entry_constants(entry_2C.shape[1]),
        num_programs=1,
        num_warps=PUT_WARPS,
    )

    def put(entry_2C: torch.Tensor, num_requests: int) -> None:
        launch(entry_2C, slots_B, num_drafts_B, num_requests, num_lanes, padding_slot)

    return put


def entry_constants(capacity: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of both kernels."""
    return {"CAPACITY": capacity, "BLOCK": power_of_two(capacity)}
