"""The ends of a round on CUDA: one program per request; twins in `runtime.kernels.round`.

Legend: S slots, T blocks of a table, B requests, W rows of each, X columns of the output.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.accept import count_accepted
from runtime.kernels.cuda.device import ceil_div, inner_contiguous, overlap_options, power_of_two
from runtime.kernels.round import RoundEnd, RoundRows

BLOCK_TABLE = 256  # entries of a table copied at once
_ALIGNED_INTS = 2  # of 8 bytes: rows of every place are aligned alike, so kernels have one variant


@triton.jit(do_not_specialize=["num_blocks", "stride_table", "stride_place"])
def prepare_round_kernel(
    slots_ptr, slot_lengths_ptr, slot_newest_ptr, slot_table_ptr,
    lengths_ptr, newest_ptr, table_ptr, positions_ptr, kv_slots_ptr,
    place_positions_ptr, place_kv_slots_ptr, round_ids_ptr,
    num_blocks, stride_table, stride_place,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy a request's numbers and table; place its rows at the positions from its length on.

    What it writes, later kernels read before their waits: nobody starts before it ends.
    """
    request = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + request)
    length = tl.load(slot_lengths_ptr + slot)
    tl.store(lengths_ptr + request, length)
    newest = tl.load(slot_newest_ptr + slot)
    tl.store(newest_ptr + request, newest)
    tl.store(round_ids_ptr + request * WIDTH, newest)
    source = slot_table_ptr + slot * stride_table
    offsets = tl.arange(0, BLOCK_W)
    mask = offsets < WIDTH
    positions = length + offsets
    blocks = tl.load(source + positions // KV_BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    tl.store(positions_ptr + request * WIDTH + offsets, positions, mask=mask)
    kv_slots = blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE
    tl.store(kv_slots_ptr + request * WIDTH + offsets, kv_slots, mask=mask)
    by_place = offsets * stride_place + request
    tl.store(place_positions_ptr + by_place, positions, mask=mask)
    tl.store(place_kv_slots_ptr + by_place, kv_slots, mask=mask)
    for start in range(0, num_blocks, BLOCK_T):
        entries = start + tl.arange(0, BLOCK_T)
        is_entry = entries < num_blocks
        copied = tl.load(source + entries, mask=is_entry, other=0)
        tl.store(table_ptr + request * num_blocks + entries, copied, mask=is_entry)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "padding_slot",
        "stride_drafts",
        "stride_chosen",
        "stride_output",
    ]
)
def finish_round_kernel(
    slots_ptr, lengths_ptr, drafts_ptr, chosen_ptr, num_drafts_ptr, first_rows_ptr,
    slot_lengths_ptr, slot_newest_ptr, output_ptr, accepted_ptr, last_rows_ptr,
    num_rows, padding_slot, stride_drafts, stride_chosen, stride_output,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Advance a request's slot by the drafts that its choices equal, and one; padding stays 0."""
    request = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, BLOCK_W)
    mask = rows < WIDTH
    chosen = tl.load(chosen_ptr + request * stride_chosen + rows, mask=mask, other=-1)
    num_accepted = count_accepted(
        chosen, drafts_ptr + request * stride_drafts, num_drafts_ptr + request, WIDTH, BLOCK_W
    ).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    length = tl.load(lengths_ptr + request) + num_accepted + 1
    newest = tl.load(chosen_ptr + request * stride_chosen + num_accepted)
    is_real = slot != padding_slot
    tl.store(slot_lengths_ptr + slot, tl.where(is_real, length, 0))
    tl.store(slot_newest_ptr + slot, tl.where(is_real, newest, 0))
    output = output_ptr + request * stride_output
    tl.store(output, num_accepted)
    tl.store(output + 1 + rows, chosen, mask=mask)
    tl.store(accepted_ptr + request, num_accepted)
    last = tl.load(first_rows_ptr + request) + num_accepted
    tl.store(last_rows_ptr + request, tl.minimum(last, num_rows - 1))


def launch_prepare_round(
    slots_B: torch.Tensor,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    block_tables_ST: torch.Tensor,
    *,
    num_blocks: int,
    width: int,
    kv_block_size: int,
) -> RoundRows:
    """Launch `prepare_round`."""
    num_requests, device = slots_B.shape[0], slots_B.device
    assert slots_B.is_contiguous(), "slots are read one by one"
    assert block_tables_ST.stride(1) == 1, "block tables are read entry by entry"
    new_ints = functools.partial(torch.empty, dtype=torch.int64, device=device)
    is_overlapping, options = overlap_options(device, None)
    padded = ceil_div(num_requests, _ALIGNED_INTS) * _ALIGNED_INTS
    rows = RoundRows(
        lengths_B=new_ints(num_requests),
        newest_ids_target_B=new_ints(num_requests),
        block_tables_BT=torch.empty((num_requests, num_blocks), dtype=torch.int32, device=device),
        positions_BW=new_ints((num_requests, width)),
        kv_slots_BW=new_ints((num_requests, width)),
        positions_WB=new_ints((width, padded))[:, :num_requests],
        kv_slots_WB=new_ints((width, padded))[:, :num_requests],
        ids_target_BW=new_ints((num_requests, width)),
    )
    prepare_round_kernel[(num_requests,)](
        slots_B,
        lengths_S,
        newest_ids_target_S,
        block_tables_ST,
        rows.lengths_B,
        rows.newest_ids_target_B,
        rows.block_tables_BT,
        rows.positions_BW,
        rows.kv_slots_BW,
        rows.positions_WB,
        rows.kv_slots_WB,
        rows.ids_target_BW,
        num_blocks,
        block_tables_ST.stride(0),
        padded,
        **prepare_constants(width, kv_block_size),
        OVERLAP=is_overlapping,
        num_warps=1,
        **options,
    )
    return rows


def launch_finish_round(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    drafts_BG: torch.Tensor,
    chosen_BW: torch.Tensor,
    num_drafts_B: torch.Tensor,
    first_rows_B: torch.Tensor,
    *,
    num_rows: int,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    output_BX: torch.Tensor,
) -> RoundEnd:
    """Launch `finish_round`."""
    num_requests, width = chosen_BW.shape
    assert width < output_BX.shape[1], "the output holds every row's choice"
    assert output_BX.stride(1) == 1, "the output is written entry by entry"
    assert slots_B.is_contiguous(), "slots are read one by one"
    chosen_BW, drafts_BG = inner_contiguous(chosen_BW), inner_contiguous(drafts_BG)
    end = RoundEnd(
        num_accepted_B=torch.empty_like(lengths_B, memory_format=torch.contiguous_format),
        last_rows_B=torch.empty_like(lengths_B, memory_format=torch.contiguous_format),
    )
    is_overlapping, options = overlap_options(chosen_BW.device, None)
    finish_round_kernel[(num_requests,)](
        slots_B,
        lengths_B.contiguous(),
        drafts_BG if width > 1 else chosen_BW,  # never read when no request has a draft
        chosen_BW,
        num_drafts_B.contiguous(),
        first_rows_B.contiguous(),
        lengths_S,
        newest_ids_target_S,
        output_BX,
        end.num_accepted_B,
        end.last_rows_B,
        num_rows,
        lengths_S.shape[0] - 1,
        drafts_BG.stride(0),
        chosen_BW.stride(0),
        output_BX.stride(0),
        **finish_constants(width),
        OVERLAP=is_overlapping,
        num_warps=1,
        **options,
    )
    return end


def prepare_constants(width: int, kv_block_size: int) -> dict[str, int]:
    """Return the compile-time arguments of `prepare_round_kernel`."""
    return {
        "WIDTH": width,
        "BLOCK_W": power_of_two(width),
        "KV_BLOCK_SIZE": kv_block_size,
        "BLOCK_T": BLOCK_TABLE,
    }


def finish_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments of `finish_round_kernel`."""
    return {"WIDTH": width, "BLOCK_W": power_of_two(width)}
