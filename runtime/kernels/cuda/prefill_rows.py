"""The rows of prompts on CUDA: one kernel; the twin is in `runtime.kernels.prefill_rows`.

Legend: N rows, R places for prompts, T blocks of a table, X numbers that the host hands in.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div, overlap_options
from runtime.kernels.prefill_rows import NUM_SCALARS, PromptRoom, PromptRows

PLACE_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows", "num_places", "num_blocks"])
def place_prompts_kernel(
    inputs_ptr, ids_ptr, positions_ptr, kv_slots_ptr, row_request_ptr, tables_ptr, next_ids_ptr,
    last_rows_ptr, num_rows, num_places, num_blocks,
    SCALARS: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Place BLOCK rows and copy BLOCK entries of the tables; PLACES is a power of two, R or more.

    What it writes, later kernels read before their waits: nobody starts before it ends.
    """
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = tl.arange(0, PLACES)
    is_place = places < num_places
    starts_ptr = inputs_ptr + num_places
    counts_ptr = starts_ptr + num_places
    firsts_ptr = counts_ptr + num_places
    table_ptr = inputs_ptr + SCALARS * num_places
    id_ptr = table_ptr + num_places * num_blocks
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    firsts = tl.load(firsts_ptr + places, mask=is_place, other=num_rows)
    mask = lanes < num_rows
    place = tl.sum((firsts[None, :] <= lanes[:, None]).to(tl.int32), axis=1) - 1
    place = tl.where(mask, place, 0)
    first = tl.load(firsts_ptr + place)
    last = tl.load(counts_ptr + place) - 1
    offsets = lanes.to(tl.int64) - first
    is_padding = offsets > last
    is_far = offsets >= (last // GROUP_ROWS + 1) * GROUP_ROWS
    own = tl.minimum(offsets, last)
    positions = tl.where(is_far, 0, tl.load(starts_ptr + place) + own)
    entry = place * num_blocks + positions // KV_BLOCK_SIZE
    blocks = tl.load(table_ptr + entry, mask=mask, other=0)
    slots = tl.where(is_padding, 0, blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE)
    tl.store(positions_ptr + lanes, positions, mask=mask)
    tl.store(kv_slots_ptr + lanes, slots, mask=mask)
    tl.store(row_request_ptr + lanes, tl.where(is_padding, num_places, place), mask=mask)
    tl.store(ids_ptr + lanes, tl.load(id_ptr + first + own, mask=mask, other=0), mask=mask)
    after = first + tl.minimum(offsets + 1, last)
    tl.store(next_ids_ptr + lanes, tl.load(id_ptr + after, mask=mask, other=0), mask=mask)
    is_known = lanes < num_places * num_blocks
    entries = tl.load(table_ptr + lanes, mask=is_known, other=0).to(tl.int32)
    tl.store(tables_ptr + lanes, entries, mask=lanes < (num_places + 1) * num_blocks)
    ends = firsts + tl.load(counts_ptr + places, mask=is_place, other=0) - 1
    ends = tl.minimum(ends, num_rows - 1)
    tl.store(last_rows_ptr + places, ends, mask=is_place & (tl.program_id(0) == 0))


def launch_place_prompts(
    inputs_X: torch.Tensor, room: PromptRoom, *, group_rows: int
) -> PromptRows:
    """Launch `place_prompts`."""
    assert inputs_X.is_contiguous(), "inputs are read one by one"
    num_rows, num_tables = room.num_rows, room.num_places + 1
    new_ints = functools.partial(torch.empty, dtype=torch.int64, device=inputs_X.device)
    new_ints_32 = functools.partial(torch.empty, dtype=torch.int32, device=inputs_X.device)
    rows = PromptRows(
        ids_target_N=new_ints(num_rows),
        positions_N=new_ints(num_rows),
        kv_slots_N=new_ints(num_rows),
        row_request_N=new_ints_32(num_rows),
        block_tables_QT=new_ints_32((num_tables, room.num_blocks)),
        next_ids_target_N=new_ints(num_rows),
        last_rows_R=new_ints(room.num_places),
    )
    overlapped, options = overlap_options(inputs_X.device, None)
    place_prompts_kernel[(ceil_div(max(num_rows, num_tables * room.num_blocks), PLACE_BLOCK),)](
        inputs_X,
        rows.ids_target_N,
        rows.positions_N,
        rows.kv_slots_N,
        rows.row_request_N,
        rows.block_tables_QT,
        rows.next_ids_target_N,
        rows.last_rows_R,
        num_rows,
        room.num_places,
        room.num_blocks,
        **place_constants(room, group_rows),
        OVERLAP=overlapped,
        num_warps=4,
        **options,
    )
    return rows


def place_constants(room: PromptRoom, group_rows: int) -> dict[str, int]:
    """Return the compile-time arguments of `place_prompts_kernel`."""
    return {
        "SCALARS": NUM_SCALARS,
        "KV_BLOCK_SIZE": room.kv_block_size,
        "GROUP_ROWS": group_rows,
        "PLACES": triton.next_power_of_2(room.num_places),
        "BLOCK": PLACE_BLOCK,
    }
