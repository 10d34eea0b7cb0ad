"""Paged attention on CUDA: one program per rows of a request, key head and segment.

A program packs the query heads of a key head, and all rows of a request where the batch is dense,
into one product. Every row keeps its own limit and a masked key adds exactly +0, so neither rows
nor requests beside it reach its bits. The softmax's denominator is a product with ones: its order
of summation is that of K, whatever the number of rows. With more than one segment a second kernel
combines in order.

Legend: M rows, H query heads, G key heads, P head size, S segments of the longest request, W rows
of each request of a dense batch, T table positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.batch import PreparedBatch
from runtime.kernels.cuda.attention_combine import attention_combine_kernel, combine_constants
from runtime.kernels.cuda.device import ceil_div, inner_contiguous, overlap_options, power_of_two
from runtime.kernels.cuda.rope import rotate_high, rotate_low
from runtime.kernels.gemm_table import attention_tile
from runtime.kernels.rows import SEGMENT
from runtime.kv import KVLayer

SEGMENT_WARPS = 8
_PARTIAL_BYTES = 1 << 28
_NO_WINDOW = 1 << 30  # keys; no position leaves it, so both cases share one binary
_MOST_PACKED = 64  # query heads times rows in one product


@triton.jit
def _write_new_keys(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, positions_ptr, slots_ptr, cos_sin_ptr,
    first_row, kv_head, segment, stride_km, stride_kg, stride_vm, stride_vg,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotate and store those of a request's new keys and values that lie in the segment."""
    HALF: tl.constexpr = HEAD_DIM // 2
    offsets = tl.arange(0, BLOCK_W)
    rows = first_row + offsets
    positions = tl.load(positions_ptr + rows, mask=offsets < WIDTH, other=-1)
    is_mine = (offsets < WIDTH) & (positions // SEGMENT_KEYS == segment)
    lanes = tl.arange(0, BLOCK_HALF)
    mask = is_mine[:, None] & (lanes < HALF)[None, :]
    angles = cos_sin_ptr + positions[:, None] * HEAD_DIM + lanes[None, :]
    cos = tl.load(angles, mask=mask, other=0.0)
    sin = tl.load(angles + HALF, mask=mask, other=0.0)
    slots = tl.load(slots_ptr + rows, mask=is_mine, other=0)
    blocks = (slots // KV_BLOCK_SIZE * KV_HEADS + kv_head) * KV_BLOCK_SIZE
    target = (blocks + slots % KV_BLOCK_SIZE)[:, None] * HEAD_DIM + lanes[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    k = k_ptr + rows[:, None] * stride_km + kv_head * stride_kg + lanes[None, :]
    v = v_ptr + rows[:, None] * stride_vm + kv_head * stride_vg + lanes[None, :]
    first = tl.load(k, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(k + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = k_pool_ptr.dtype.element_ty
    tl.store(k_pool_ptr + target, rotate_low(first, second, cos, sin).to(dtype), mask=mask)
    tl.store(k_pool_ptr + target + HALF, rotate_high(first, second, cos, sin).to(dtype), mask=mask)
    tl.store(v_pool_ptr + target, tl.load(v, mask=mask, other=0.0), mask=mask)
    tl.store(v_pool_ptr + target + HALF, tl.load(v + HALF, mask=mask, other=0.0), mask=mask)


@triton.jit
def _load_keys(
    k_pool_ptr, v_pool_ptr, table_row, keys, is_key, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load both halves of a step's keys [P / 2, TILE] and its values [TILE, P]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, BLOCK_HALF)
    all_lanes = tl.arange(0, BLOCK_P)
    blocks = tl.load(table_row + keys // KV_BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    slots = (blocks * KV_HEADS + kv_head) * KV_BLOCK_SIZE + keys % KV_BLOCK_SIZE
    k_rows = k_pool_ptr + slots[None, :] * HEAD_DIM + lanes[:, None]
    k_mask = is_key[None, :] & (lanes < HALF)[:, None]
    k_low = tl.load(k_rows, mask=k_mask, other=0.0)
    k_high = tl.load(k_rows + HALF, mask=k_mask, other=0.0)
    v_rows = v_pool_ptr + slots[:, None] * HEAD_DIM + all_lanes[None, :]
    v = tl.load(v_rows, mask=is_key[:, None] & (all_lanes < HEAD_DIM)[None, :], other=0.0)
    return k_low, k_high, v


@triton.jit
def _weigh_values(weights, values, v, sees):
    """Add weights @ v; a lane in which a row sees a value that is not finite becomes NaN.

    Rows share v: 0 times an infinite value that only other rows see must not reach a row.
    """
    out = tl.dot(weights, v, values, input_precision="ieee")
    is_bad = tl.abs(out) < float("inf")
    if tl.min(tl.min(is_bad.to(tl.int32), axis=1), axis=0) == 0:
        is_finite = tl.abs(v.to(tl.float32)) < float("inf")
        clean = tl.where(is_finite, v, 0.0).to(v.dtype)
        poison = tl.where(is_finite, 0.0, 1.0).to(v.dtype)
        hits = tl.dot(sees.to(v.dtype), poison, input_precision="ieee")
        out = tl.dot(weights, clean, values, input_precision="ieee")
        out = tl.where(hits > 0.0, float("nan"), out)
    return out


@triton.jit
def _attend_steps(
    q_low, q_high, k_pool_ptr, v_pool_ptr, table_row,
    begin, end, least_key, first_keys, limits, kv_head, scale_log2,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over begin..end; return maximum, total (16 equal columns), values."""
    ones = tl.full((TILE, 16), 1.0, dtype=q_low.dtype)
    maximum = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    for tile in tl.range(begin, end, TILE, num_stages=1):
        keys = tile + tl.arange(0, TILE)
        k_low, k_high, v = _load_keys(
            k_pool_ptr, v_pool_ptr, table_row, keys,
            (keys < end) & (keys >= least_key), kv_head, KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE,
            BLOCK_HALF, BLOCK_P,
        )  # fmt: skip
        scores = tl.dot(q_low, k_low, input_precision="ieee")
        scores = tl.dot(q_high, k_high, scores, input_precision="ieee") * scale_log2
        sees = (keys[None, :] <= limits[:, None]) & (keys[None, :] >= first_keys[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen no key yet subtracts 0, so that no NaN arises.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        keep = tl.exp2(maximum - shift)[:, None]
        weights = tl.exp2(scores - shift[:, None]).to(v.dtype)
        total = tl.dot(weights, ones, total * keep, input_precision="ieee")
        values = _weigh_values(weights, values * keep, v, sees)
        maximum = new_maximum
    return maximum, total, values


@triton.jit(do_not_specialize=["row_start", "num_segments", "window", "stride_table"])
def attention_segment_kernel(
    q_ptr, k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, positions_ptr, windows_ptr, limits_ptr, slots_ptr,
    row_request_ptr, table_ptr, cos_sin_ptr, values_ptr, maximum_ptr, total_ptr, out_ptr,
    scale_log2, row_start, num_segments, window,
    stride_qm, stride_qh, stride_km, stride_kg, stride_vm, stride_vg, stride_table,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr, SEGMENT_KEYS: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, PART_ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_P: tl.constexpr,
    FUSED: tl.constexpr, SINGLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted values of one segment for the rows and query heads of a program.

    Single, the segment is the only one and [M, H, P] is stored. Else values [M, H, S, P], maximum
    and total [M, H, S] (float32, base-2 scores) go to the rows' place in this launch; nothing if no
    row sees a key of the segment. Fused, queries and keys come unrotated and the program stores the
    new keys and values that it is about to read.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    request_part = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    first_row = row_start + request_part // PARTS * WIDTH
    part_row = request_part % PARTS * PART_ROWS
    packed = tl.arange(0, BLOCK_M)
    row_offset = part_row + packed // GROUP
    is_row = (packed < PART_ROWS * GROUP) & (row_offset < WIDTH)
    rows = first_row + row_offset
    heads = kv_head * GROUP + packed % GROUP
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    limits = tl.load(limits_ptr + rows, mask=is_row, other=-1).to(tl.int32)
    windows = tl.load(windows_ptr + rows, mask=is_row, other=0).to(tl.int32)
    first_keys = tl.maximum(windows - window + 1, 0)
    least_key = tl.min(tl.where(is_row, first_keys, 2147483647), axis=0)
    begin = tl.maximum(segment * SEGMENT_KEYS, least_key // TILE * TILE)
    end = tl.minimum((segment + 1) * SEGMENT_KEYS, tl.max(limits, axis=0) + 1)
    if begin < end:
        request = tl.load(row_request_ptr + first_row).to(tl.int64)
        lanes = tl.arange(0, BLOCK_HALF)
        half_mask = is_row[:, None] & (lanes < HALF)[None, :]
        q_rows = q_ptr + rows[:, None] * stride_qm + heads[:, None] * stride_qh + lanes[None, :]
        if FUSED:
            positions = tl.load(positions_ptr + rows, mask=is_row, other=0)
            angles = cos_sin_ptr + positions[:, None] * HEAD_DIM + lanes[None, :]
            cos = tl.load(angles, mask=half_mask, other=0.0)
            sin = tl.load(angles + HALF, mask=half_mask, other=0.0)
            _write_new_keys(
                k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, positions_ptr, slots_ptr, cos_sin_ptr,
                first_row, kv_head, segment, stride_km, stride_kg, stride_vm, stride_vg,
                KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, SEGMENT_KEYS, WIDTH, BLOCK_W, BLOCK_HALF,
                OVERLAP,
            )  # fmt: skip
        elif OVERLAP:
            tl.extra.cuda.gdc_wait()
        q_low = tl.load(q_rows, mask=half_mask, other=0.0)
        q_high = tl.load(q_rows + HALF, mask=half_mask, other=0.0)
        if FUSED:
            first, second = q_low.to(tl.float32), q_high.to(tl.float32)
            q_low = rotate_low(first, second, cos, sin).to(q_ptr.dtype.element_ty)
            q_high = rotate_high(first, second, cos, sin).to(q_ptr.dtype.element_ty)
            tl.debug_barrier()  # the program reads back the keys that its threads stored
        all_lanes = tl.arange(0, BLOCK_P)
        is_lane = all_lanes < HEAD_DIM
        maximum, total, values = _attend_steps(
            q_low, q_high, k_pool_ptr, v_pool_ptr, table_ptr + request * stride_table,
            begin, end, least_key, first_keys, limits, kv_head, scale_log2,
            KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, TILE, BLOCK_M, BLOCK_HALF, BLOCK_P,
        )  # fmt: skip
        sums = tl.max(total, axis=1)  # sixteen equal columns
        mask = is_row[:, None] & is_lane[None, :]
        if SINGLE:
            out = out_ptr + (rows * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM
            mixed = values / sums[:, None]
            tl.store(out + all_lanes[None, :], mixed.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            local = (rows - row_start) * (KV_HEADS * GROUP) + heads
            place = local * num_segments + segment
            tl.store(maximum_ptr + place, maximum, mask=is_row)
            tl.store(total_ptr + place, sums, mask=is_row)
            tl.store(values_ptr + place[:, None] * HEAD_DIM + all_lanes[None, :], values, mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRows:
    """What a fused launch reads besides queries: unrotated keys, values and the rotary table."""

    k_MGP: torch.Tensor
    v_MGP: torch.Tensor
    cos_sin_TP: torch.Tensor


def launch_paged_attention(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    *,
    scale: float,
    window: int | None = None,
    new: NewRows | None = None,
    overlap: bool | None = None,
) -> torch.Tensor:
    """Launch `paged_attention`, or with `new` the fused `attend_new_rows` of a dense batch."""
    is_whole = layer.k.is_contiguous() and layer.v.is_contiguous()
    assert is_whole, "each pool is one block of memory"
    assert batch.block_tables_BT.stride(1) == 1, "block tables are read entry by entry"
    q_MHP = inner_contiguous(q_MHP)
    num_rows, num_heads, head_dim = q_MHP.shape
    num_segments = ceil_div(batch.max_length, SEGMENT)
    width = batch.rows_per_request or 1
    out = torch.empty_like(q_MHP, memory_format=torch.contiguous_format)
    # Chunks bound the partials of a long prefill; rows are independent, so cuts change no bits.
    fitting = _PARTIAL_BYTES // (num_heads * num_segments * head_dim * 4)
    chunk = num_rows if num_segments == 1 else max(width, fitting // width * width)
    for start in range(0, num_rows, max(chunk, 1)):
        count = min(chunk, num_rows - start)
        _launch_rows(
            q_MHP, layer, batch, out, start, count,
            scale=scale, window=window, new=new, overlap=overlap,
        )  # fmt: skip
    return out


def _launch_rows(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    out_MHP: torch.Tensor,
    row_start: int,
    num_rows: int,
    *,
    scale: float,
    window: int | None,
    new: NewRows | None,
    overlap: bool | None,
) -> None:
    _, num_heads, head_dim = q_MHP.shape
    _, num_kv_heads, kv_block_size, _ = layer.k.shape
    num_segments = ceil_div(batch.max_length, SEGMENT)
    is_single = num_segments == 1
    shape = (0,) if is_single else (num_rows, num_heads, num_segments)
    values = q_MHP.new_empty((*shape, head_dim), dtype=torch.float32)
    maximum, total = (q_MHP.new_empty(shape, dtype=torch.float32) for _ in range(2))
    own = batch.positions_N
    windows = own if batch.window_positions_N is None else batch.window_positions_N
    limits = own if batch.limits_N is None else batch.limits_N
    window_keys = _NO_WINDOW if window is None else window
    width = batch.rows_per_request or 1
    k, v = (q_MHP, q_MHP) if new is None else (new.k_MGP, new.v_MGP)
    constants = segment_constants(
        num_heads, num_kv_heads, head_dim, kv_block_size, width, q_MHP.element_size()
    )
    is_overlapping, options = overlap_options(q_MHP.device, overlap)
    grid = (num_rows // width * constants["PARTS"], num_kv_heads, num_segments)
    attention_segment_kernel[grid](
        q_MHP,
        k,
        v,
        layer.k,
        layer.v,
        own,
        windows,
        limits,
        batch.slots_N,
        batch.row_request_N,
        batch.block_tables_BT,
        own if new is None else new.cos_sin_TP,
        values,
        maximum,
        total,
        out_MHP,
        scale * math.log2(math.e),
        row_start,
        num_segments,
        window_keys,
        q_MHP.stride(0),
        q_MHP.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        batch.block_tables_BT.stride(0),
        **constants,
        FUSED=new is not None,
        SINGLE=is_single,
        OVERLAP=is_overlapping,
        num_warps=SEGMENT_WARPS,
        **options,
    )
    if not is_single:
        attention_combine_kernel[(num_rows, num_heads)](
            values,
            maximum,
            total,
            windows,
            limits,
            out_MHP,
            row_start,
            num_segments,
            window_keys,
            **combine_constants(num_heads, head_dim),
            num_warps=1,
        )


def segment_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_block_size: int,
    width: int,
    element_bytes: int,
) -> dict[str, int]:
    """Return the compile-time arguments of `attention_segment_kernel` that are no flags."""
    group = num_heads // num_kv_heads
    part_rows = min(width, max(1, _MOST_PACKED // group))
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "KV_BLOCK_SIZE": kv_block_size,
        "SEGMENT_KEYS": SEGMENT,
        "TILE": attention_tile(head_dim, element_bytes=element_bytes),
        "WIDTH": width,
        "PART_ROWS": part_rows,
        "PARTS": ceil_div(width, part_rows),
        "BLOCK_W": power_of_two(width),
        "BLOCK_M": power_of_two(part_rows * group, at_least=16),
        "BLOCK_HALF": power_of_two(head_dim // 2, at_least=16),
        "BLOCK_P": power_of_two(head_dim, at_least=16),
    }
