"""The rows of a prompt on CUDA: one kernel; the twin is in `runtime.kernels.prefill_rows`.

Legend: N rows, T blocks of a table, X numbers that the host hands in.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div, overlap_options
from runtime.kernels.prefill_rows import NUM_SCALARS, PromptRows

PLACE_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "first_id"])
def place_prompt_kernel(
    inputs_ptr, ids_ptr, positions_ptr, kv_slots_ptr, row_request_ptr, table_ptr, next_ids_ptr,
    last_row_ptr, num_rows, num_blocks, first_id,
    SCALARS: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place BLOCK rows and copy BLOCK entries of the table.

    What it writes, later kernels read before their waits: nobody starts before it ends.
    """
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    start = tl.load(inputs_ptr + 1)
    last = tl.load(inputs_ptr + 2) - 1
    mask = lanes < num_rows
    own = tl.minimum(lanes.to(tl.int64), last)
    positions = start + own
    blocks = tl.load(inputs_ptr + SCALARS + positions // KV_BLOCK_SIZE, mask=mask, other=0)
    is_padding = lanes > last
    slots = tl.where(is_padding, 0, blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE)
    tl.store(positions_ptr + lanes, positions, mask=mask)
    tl.store(kv_slots_ptr + lanes, slots, mask=mask)
    tl.store(row_request_ptr + lanes, is_padding.to(tl.int32), mask=mask)
    ids = inputs_ptr + first_id
    tl.store(ids_ptr + lanes, tl.load(ids + own, mask=mask, other=0), mask=mask)
    following = tl.load(ids + tl.minimum(lanes + 1, last), mask=mask, other=0)
    tl.store(next_ids_ptr + lanes, following, mask=mask)
    is_entry = lanes < num_blocks
    entries = tl.load(inputs_ptr + SCALARS + lanes, mask=is_entry, other=0).to(tl.int32)
    tl.store(table_ptr + lanes, entries, mask=is_entry)
    tl.store(table_ptr + num_blocks + lanes, entries * 0, mask=is_entry)
    tl.store(last_row_ptr + lanes, last + lanes, mask=lanes == 0)


def launch_place_prompt(
    inputs_X: torch.Tensor, *, num_rows: int, num_blocks: int, first_id: int, kv_block_size: int
) -> PromptRows:
    """Launch `place_prompt`."""
    assert inputs_X.is_contiguous(), "inputs are read one by one"
    new_ints = functools.partial(torch.empty, dtype=torch.int64, device=inputs_X.device)
    new_ints_32 = functools.partial(torch.empty, dtype=torch.int32, device=inputs_X.device)
    rows = PromptRows(
        ids_target_N=new_ints(num_rows),
        positions_N=new_ints(num_rows),
        kv_slots_N=new_ints(num_rows),
        row_request_N=new_ints_32(num_rows),
        block_tables_2T=new_ints_32((2, num_blocks)),
        next_ids_target_N=new_ints(num_rows),
        last_row_1=new_ints(1),
    )
    overlapped, options = overlap_options(inputs_X.device, None)
    place_prompt_kernel[(ceil_div(max(num_rows, num_blocks), PLACE_BLOCK),)](
        inputs_X,
        rows.ids_target_N,
        rows.positions_N,
        rows.kv_slots_N,
        rows.row_request_N,
        rows.block_tables_2T,
        rows.next_ids_target_N,
        rows.last_row_1,
        num_rows,
        num_blocks,
        first_id,
        **place_constants(kv_block_size),
        OVERLAP=overlapped,
        num_warps=4,
        **options,
    )
    return rows


def place_constants(kv_block_size: int) -> dict[str, int]:
    """Return the compile-time arguments of `place_prompt_kernel`."""
    return {"SCALARS": NUM_SCALARS, "KV_BLOCK_SIZE": kv_block_size, "BLOCK": PLACE_BLOCK}
