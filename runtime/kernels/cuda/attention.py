"""Paged attention on CUDA: one program per row, key head and segment, then an ordered combine.

A program reads only its row's query, position, limit and keys, so other rows cannot reach its bits;
the longest request sizes the grid and the stride of the partials, nothing else.

Legend: M rows, H query heads, G key heads, P head size, S segments of the longest request.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from runtime.batch import PreparedBatch
from runtime.kernels.cuda.device import ceil_div, inner_contiguous, power_of_two
from runtime.kernels.gemm_table import ATTENTION_TILE
from runtime.kernels.rows import SEGMENT
from runtime.kv import KVLayer

ATTENTION_WARPS = 4
ATTENTION_STAGES = 2
_PARTIAL_BYTES = 1 << 28
_NO_WINDOW = 1 << 30  # keys; no position leaves it, so both cases share one binary


@triton.jit(do_not_specialize=["row_start", "num_segments", "window", "stride_table"])
def attention_segment_kernel(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    positions_ptr,
    limits_ptr,
    row_request_ptr,
    table_ptr,
    values_ptr,
    maximum_ptr,
    total_ptr,
    scale_log2,
    row_start,
    num_segments,
    window,
    stride_qm,
    stride_qh,
    stride_table,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Softmax-weighted values of one segment for the query heads of one key head of one row.

    Writes values [M, H, S, P], maximum and total [M, H, S] (float32, base-2 scores) at the row's
    place in this launch; nothing if the row sees no key of the segment.
    """
    local_row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    row = row_start + local_row
    position = tl.load(positions_ptr + row).to(tl.int32)
    first_key = tl.maximum(position - window + 1, 0)
    begin = tl.maximum(segment * SEGMENT_KEYS, first_key // TILE * TILE)
    limit = tl.load(limits_ptr + row).to(tl.int32)
    end = tl.minimum((segment + 1) * SEGMENT_KEYS, limit + 1)
    if begin < end:
        request = tl.load(row_request_ptr + row).to(tl.int64)
        heads = tl.arange(0, BLOCK_H)
        lanes = tl.arange(0, BLOCK_P)
        is_head = heads < GROUP
        is_lane = lanes < HEAD_DIM
        query_heads = kv_head * GROUP + heads
        q_mask = is_head[:, None] & is_lane[None, :]
        q_offsets = row * stride_qm + query_heads[:, None] * stride_qh + lanes[None, :]
        q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
        maximum = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_H,), dtype=tl.float32)
        values = tl.zeros((BLOCK_H, BLOCK_P), dtype=tl.float32)
        for tile in range(begin, end, TILE):
            keys = tile + tl.arange(0, TILE)
            is_key = (keys < end) & (keys >= first_key)
            blocks = tl.load(
                table_ptr + request * stride_table + keys // KV_BLOCK_SIZE, mask=is_key, other=0
            ).to(tl.int64)
            slots = (blocks * KV_HEADS + kv_head) * KV_BLOCK_SIZE + keys % KV_BLOCK_SIZE
            offsets = slots * HEAD_DIM
            k = tl.load(
                k_pool_ptr + offsets[None, :] + lanes[:, None],
                mask=is_key[None, :] & is_lane[:, None],
                other=0.0,
            )
            v = tl.load(
                v_pool_ptr + offsets[:, None] + lanes[None, :],
                mask=is_key[:, None] & is_lane[None, :],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale_log2
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            keep = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(scores - new_maximum[:, None])
            total = total * keep + tl.sum(weights, axis=1)
            values = tl.dot(weights.to(v.dtype), v, values * keep[:, None], input_precision="ieee")
            maximum = new_maximum
        out = (local_row * (KV_HEADS * GROUP) + query_heads) * num_segments + segment
        tl.store(maximum_ptr + out, maximum, mask=is_head)
        tl.store(total_ptr + out, total, mask=is_head)
        tl.store(values_ptr + out[:, None] * HEAD_DIM + lanes[None, :], values, mask=q_mask)


@triton.jit(do_not_specialize=["row_start", "num_segments", "window"])
def attention_combine_kernel(
    values_ptr,
    maximum_ptr,
    total_ptr,
    positions_ptr,
    limits_ptr,
    out_ptr,
    row_start,
    num_segments,
    window,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Fold one head's segments in ascending order; the loop's bounds follow the row's limit."""
    local_row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = row_start + local_row
    position = tl.load(positions_ptr + row).to(tl.int32)
    first_segment = tl.maximum(position - window + 1, 0) // SEGMENT_KEYS
    last_segment = tl.load(limits_ptr + row).to(tl.int32) // SEGMENT_KEYS
    lanes = tl.arange(0, BLOCK_P)
    mask = lanes < HEAD_DIM
    base = (local_row * HEADS + head) * num_segments
    maximum = tl.load(maximum_ptr + base + first_segment)
    total = tl.load(total_ptr + base + first_segment)
    values = tl.load(values_ptr + (base + first_segment) * HEAD_DIM + lanes, mask=mask, other=0.0)
    for segment in range(first_segment + 1, last_segment + 1):
        part_maximum = tl.load(maximum_ptr + base + segment)
        part_total = tl.load(total_ptr + base + segment)
        part_values = tl.load(
            values_ptr + (base + segment) * HEAD_DIM + lanes, mask=mask, other=0.0
        )
        new_maximum = tl.maximum(maximum, part_maximum)
        keep = tl.exp2(maximum - new_maximum)
        add = tl.exp2(part_maximum - new_maximum)
        total = total * keep + part_total * add
        values = values * keep + part_values * add
        maximum = new_maximum
    out = out_ptr + (row * HEADS + head) * HEAD_DIM + lanes
    tl.store(out, (values / total).to(out_ptr.dtype.element_ty), mask=mask)


def launch_paged_attention(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Launch `paged_attention`."""
    assert layer.k.is_contiguous(), "the key pool is one block of memory"
    assert layer.v.is_contiguous(), "the value pool is one block of memory"
    assert batch.block_tables_BT.stride(1) == 1, "block tables are read entry by entry"
    q_MHP = inner_contiguous(q_MHP)
    num_rows, num_heads, head_dim = q_MHP.shape
    num_segments = ceil_div(batch.max_length, SEGMENT)
    out = torch.empty(q_MHP.shape, dtype=q_MHP.dtype, device=q_MHP.device)
    # Chunks bound the partials of a long prefill; rows are independent, so cuts change no bits.
    chunk = max(1, _PARTIAL_BYTES // (num_heads * num_segments * head_dim * 4))
    for start in range(0, num_rows, chunk):
        count = min(chunk, num_rows - start)
        _launch_rows(q_MHP, layer, batch, out, start, count, scale=scale, window=window)
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
) -> None:
    _, num_heads, head_dim = q_MHP.shape
    _, num_kv_heads, kv_block_size, _ = layer.k.shape
    num_segments = ceil_div(batch.max_length, SEGMENT)
    shape = (num_rows, num_heads, num_segments)
    values = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_MHP.device)
    maximum = torch.empty(shape, dtype=torch.float32, device=q_MHP.device)
    total = torch.empty(shape, dtype=torch.float32, device=q_MHP.device)
    own, windows = batch.positions_N, batch.window_positions_N
    positions = own if windows is None else windows
    limits = own if batch.limits_N is None else batch.limits_N
    window_keys = _NO_WINDOW if window is None else window
    attention_segment_kernel[(num_rows, num_kv_heads, num_segments)](
        q_MHP,
        layer.k,
        layer.v,
        positions,
        limits,
        batch.row_request_N,
        batch.block_tables_BT,
        values,
        maximum,
        total,
        scale * math.log2(math.e),
        row_start,
        num_segments,
        window_keys,
        q_MHP.stride(0),
        q_MHP.stride(1),
        batch.block_tables_BT.stride(0),
        **segment_constants(num_heads, num_kv_heads, head_dim, kv_block_size),
        num_warps=ATTENTION_WARPS,
        num_stages=ATTENTION_STAGES,
    )
    attention_combine_kernel[(num_rows, num_heads)](
        values,
        maximum,
        total,
        positions,
        limits,
        out_MHP,
        row_start,
        num_segments,
        window_keys,
        **combine_constants(num_heads, head_dim),
        num_warps=1,
    )


def segment_constants(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_block_size: int
) -> dict[str, int]:
    """Return the compile-time arguments of `attention_segment_kernel`."""
    group = num_heads // num_kv_heads
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "KV_BLOCK_SIZE": kv_block_size,
        "SEGMENT_KEYS": SEGMENT,
        "TILE": ATTENTION_TILE,
        "BLOCK_H": power_of_two(group, at_least=16),
        "BLOCK_P": power_of_two(head_dim, at_least=16),
    }


def combine_constants(num_heads: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `attention_combine_kernel`."""
    return {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "SEGMENT_KEYS": SEGMENT,
        "BLOCK_P": power_of_two(head_dim),
    }
