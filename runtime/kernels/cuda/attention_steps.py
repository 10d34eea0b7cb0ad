"""The steps of paged attention on CUDA: keys of a step, the online softmax, segments in order.

Older keys of a request are final since earlier launches and may be loaded before the kernel that
makes the new rows has ended; the program then writes the new ones to the pool and reads them back
into their places among the old.

Legend: M rows times query heads of a program, P head size, S segments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.cuda.norm import norm_heads
from runtime.kernels.cuda.rope import rotate_high, rotate_low


@triton.jit
def key_places(
    table_row, keys, is_key, kv_head, KV_HEADS: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr
):
    """Return where keys lie in a pool, in heads of one position."""
    blocks = tl.load(table_row + keys // KV_BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    return (blocks * KV_HEADS + kv_head) * KV_BLOCK_SIZE + keys % KV_BLOCK_SIZE


@triton.jit
def load_keys(
    k_pool_ptr, v_pool_ptr, places, is_key, k_low, k_high, v,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load both halves of keys [P / 2, TILE] and values [TILE, P]; elsewhere keep those given."""
    HALF: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, BLOCK_HALF)
    all_lanes = tl.arange(0, BLOCK_P)
    k_rows = k_pool_ptr + places[None, :] * HEAD_DIM + lanes[:, None]
    k_mask = is_key[None, :] & (lanes < HALF)[:, None]
    k_low = tl.load(k_rows, mask=k_mask, other=k_low)
    k_high = tl.load(k_rows + HALF, mask=k_mask, other=k_high)
    v_rows = v_pool_ptr + places[:, None] * HEAD_DIM + all_lanes[None, :]
    v = tl.load(v_rows, mask=is_key[:, None] & (all_lanes < HEAD_DIM)[None, :], other=v)
    return k_low, k_high, v


@triton.jit
def store_new_keys(
    k_low, k_high, v_low, v_high, cos, sin, k_pool_ptr, v_pool_ptr, slots, mask, kv_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Rotate new keys and write them and their values to the pool."""
    HALF: tl.constexpr = HEAD_DIM // 2
    lanes = tl.arange(0, BLOCK_HALF)
    blocks = (slots // KV_BLOCK_SIZE * KV_HEADS + kv_head) * KV_BLOCK_SIZE
    target = (blocks + slots % KV_BLOCK_SIZE)[:, None] * HEAD_DIM + lanes[None, :]
    first, second = k_low.to(tl.float32), k_high.to(tl.float32)
    dtype = k_pool_ptr.dtype.element_ty
    tl.store(k_pool_ptr + target, rotate_low(first, second, cos, sin).to(dtype), mask=mask)
    tl.store(k_pool_ptr + target + HALF, rotate_high(first, second, cos, sin).to(dtype), mask=mask)
    tl.store(v_pool_ptr + target, v_low, mask=mask)
    tl.store(v_pool_ptr + target + HALF, v_high, mask=mask)


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
def attend_keys(
    maximum, total, values, q_low, q_high, k_low, k_high, v, keys, limits, first_keys, scale_log2,
    TILE: tl.constexpr,
):  # fmt: skip
    """Take one step of the online softmax; total has 16 equal columns."""
    ones = tl.full((TILE, 16), 1.0, dtype=v.dtype)
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
    return new_maximum, total, values


@triton.jit
def attend_segment(
    q_rows, q_mask, q_angles, k_rows, v_rows, k_mask, k_angles, new_slots,
    k_pool_ptr, v_pool_ptr, table_row, begin, end, least_key, first_new_key, limits, first_keys,
    kv_head, scale_log2, q_norm_ptr, k_norm_ptr, norm_eps,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    EARLY: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_P: tl.constexpr, FUSED: tl.constexpr, NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over begin..end: maximum, total, values of each row, its query.

    EARLY, where one step holds a segment: its older keys are on their way before the wait.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    k_low = tl.zeros((BLOCK_HALF, TILE), dtype=k_pool_ptr.dtype.element_ty)
    k_high = k_low
    v = tl.zeros((TILE, BLOCK_P), dtype=v_pool_ptr.dtype.element_ty)
    keys = begin + tl.arange(0, TILE)
    is_key = (keys < end) & (keys >= least_key)
    places = key_places(table_row, keys, is_key, kv_head, KV_HEADS, KV_BLOCK_SIZE)
    if EARLY:
        k_low, k_high, v = load_keys(
            k_pool_ptr, v_pool_ptr, places, is_key & (keys < first_new_key), k_low, k_high, v,
            HEAD_DIM, BLOCK_HALF, BLOCK_P,
        )  # fmt: skip
    if FUSED:
        q_cos = tl.load(q_angles, mask=q_mask, other=0.0)
        q_sin = tl.load(q_angles + HALF, mask=q_mask, other=0.0)
        k_cos = tl.load(k_angles, mask=k_mask, other=0.0)
        k_sin = tl.load(k_angles + HALF, mask=k_mask, other=0.0)
    if NORMED:
        lanes = tl.arange(0, BLOCK_HALF)[None, :]
        q_weight = tl.load(q_norm_ptr + lanes, mask=lanes < HALF, other=0.0)
        q_weight_high = tl.load(q_norm_ptr + HALF + lanes, mask=lanes < HALF, other=0.0)
        k_weight = tl.load(k_norm_ptr + lanes, mask=lanes < HALF, other=0.0)
        k_weight_high = tl.load(k_norm_ptr + HALF + lanes, mask=lanes < HALF, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if FUSED:  # issued before the queries, which pass through shared memory at once
        new_low = tl.load(k_rows, mask=k_mask, other=0.0)
        new_high = tl.load(k_rows + HALF, mask=k_mask, other=0.0)
        v_low = tl.load(v_rows, mask=k_mask, other=0.0)
        v_high = tl.load(v_rows + HALF, mask=k_mask, other=0.0)
    q_low = tl.load(q_rows, mask=q_mask, other=0.0)
    q_high = tl.load(q_rows + HALF, mask=q_mask, other=0.0)
    if NORMED:
        new_low, new_high = norm_heads(
            new_low, new_high, k_weight, k_weight_high, norm_eps, BLOCK_W, BLOCK_HALF, HEAD_DIM
        )
        q_low, q_high = norm_heads(
            q_low, q_high, q_weight, q_weight_high, norm_eps, BLOCK_M, BLOCK_HALF, HEAD_DIM
        )
    if FUSED:
        store_new_keys(
            new_low, new_high, v_low, v_high, k_cos, k_sin, k_pool_ptr, v_pool_ptr, new_slots,
            k_mask, kv_head, KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, BLOCK_HALF,
        )  # fmt: skip
        first, second = q_low.to(tl.float32), q_high.to(tl.float32)
        q_low = rotate_low(first, second, q_cos, q_sin).to(q_low.dtype)
        q_high = rotate_high(first, second, q_cos, q_sin).to(q_high.dtype)
        tl.debug_barrier()  # the program reads back the keys that its threads stored
    if EARLY:
        if FUSED:
            k_low, k_high, v = load_keys(
                k_pool_ptr, v_pool_ptr, places, is_key & (keys >= first_new_key), k_low, k_high, v,
                HEAD_DIM, BLOCK_HALF, BLOCK_P,
            )  # fmt: skip
        maximum, total, values = attend_keys(
            tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32),
            tl.zeros((BLOCK_M, 16), dtype=tl.float32),
            tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32),
            q_low, q_high, k_low, k_high, v, keys, limits, first_keys, scale_log2, TILE,
        )  # fmt: skip
        total = tl.max(total, axis=1)
    else:
        maximum, total, values = attend_stored(
            q_low, q_high, k_pool_ptr, v_pool_ptr, table_row, begin, end, least_key, limits,
            first_keys, kv_head, scale_log2, KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, TILE, BLOCK_M,
            BLOCK_HALF, BLOCK_P,
        )  # fmt: skip
    return maximum, total, values, q_low, q_high


@triton.jit
def attend_stored(
    q_low, q_high, k_pool_ptr, v_pool_ptr, table_row, begin, end, least_key, limits, first_keys,
    kv_head, scale_log2,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over keys begin..end of the pool; results as `attend_segment`."""
    maximum = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, 16), dtype=tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    k_zero = tl.zeros((BLOCK_HALF, TILE), dtype=k_pool_ptr.dtype.element_ty)
    v_zero = tl.zeros((TILE, BLOCK_P), dtype=v_pool_ptr.dtype.element_ty)
    for step in tl.range(begin, end, TILE, num_stages=1):
        keys = step + tl.arange(0, TILE)
        is_key = (keys < end) & (keys >= least_key)
        places = key_places(table_row, keys, is_key, kv_head, KV_HEADS, KV_BLOCK_SIZE)
        k_low, k_high, v = load_keys(
            k_pool_ptr, v_pool_ptr, places, is_key, k_zero, k_zero, v_zero,
            HEAD_DIM, BLOCK_HALF, BLOCK_P,
        )  # fmt: skip
        maximum, total, values = attend_keys(
            maximum, total, values, q_low, q_high, k_low, k_high, v, keys, limits, first_keys,
            scale_log2, TILE,
        )  # fmt: skip
    return maximum, tl.max(total, axis=1), values


@triton.jit
def fold_segment(
    maximum, total, values, part_maximum, part_total, part_values, segment,
    first_segments, last_segments, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Add a segment to those before it, for each row if it lies between the row's own bounds.

    The products are rounded before the fused additions, so every tile shape makes the same sums.
    """
    new_maximum = tl.maximum(maximum, part_maximum)
    keep = tl.exp2(maximum - new_maximum)
    add = tl.exp2(part_maximum - new_maximum)
    keeps = tl.broadcast_to(keep[:, None], (BLOCK_M, BLOCK_P))
    adds = tl.broadcast_to(add[:, None], (BLOCK_M, BLOCK_P))
    is_first = segment == first_segments
    is_later = (segment > first_segments) & (segment <= last_segments)
    total = tl.where(is_later, tl.fma(part_total, add, total * keep), total)
    total = tl.where(is_first, part_total, total)
    values = tl.where(is_later[:, None], tl.fma(part_values, adds, values * keeps), values)
    values = tl.where(is_first[:, None], part_values, values)
    maximum = tl.where(is_first, part_maximum, tl.where(is_later, new_maximum, maximum))
    return maximum, total, values


@triton.jit
def _load_part(
    values_ptr, maximum_ptr, total_ptr, segment_start, is_read,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load a segment that another multiprocessor wrote, past the first-level cache; else zeros."""
    place = segment_start * BLOCK_M + tl.arange(0, BLOCK_M)
    values = values_ptr + place[:, None] * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    return (
        tl.load(maximum_ptr + place, mask=is_read, other=0.0, cache_modifier=".cg"),
        tl.load(total_ptr + place, mask=is_read, other=0.0, cache_modifier=".cg"),
        tl.load(values, mask=is_read[:, None], other=0.0, cache_modifier=".cg"),
    )


@triton.jit
def combine_segments(
    values_ptr, maximum_ptr, total_ptr, base, is_packed, first_segments, last_segments, low, high,
    FOLDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Fold the segments low..high in ascending order; FOLDED of them are on their way at once."""
    maximum = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    values = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    for first in range(low, high + 1, FOLDED):
        parts = ()
        for ahead in tl.static_range(FOLDED):
            part = _load_part(
                values_ptr, maximum_ptr, total_ptr, base + first + ahead,
                is_packed & (first + ahead <= high), BLOCK_M, BLOCK_P,
            )  # fmt: skip
            parts += (part,)  # type: ignore[assignment]  # a tuple of another length
        for ahead in tl.static_range(FOLDED):
            part = parts[ahead]
            maximum, total, values = fold_segment(
                maximum, total, values, part[0], part[1], part[2], first + ahead,
                first_segments, last_segments, BLOCK_M, BLOCK_P,
            )  # fmt: skip
    return total, values


@triton.jit
def join_segments(
    maximum, total, values, values_ptr, maximum_ptr, total_ptr, counter, base, segment,
    first_segments, last_segments, low, high,
    PACKED: tl.constexpr, TILED: tl.constexpr, FOLDED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Store a segment; the last program to arrive returns (True, total, values) of all of them.

    It leaves the counter at 0. The barrier and the counter's order make the parts of all programs
    visible to it. Rows with one segment are done at once; in row tiles they take this way, too, as
    the other one spills there.
    """
    is_last = low == high
    if (low < high) | TILED:
        packed = tl.arange(0, BLOCK_M)
        is_packed = packed < PACKED
        place = (base + segment) * BLOCK_M + packed
        lanes = tl.arange(0, BLOCK_P)
        tl.store(maximum_ptr + place, maximum, mask=is_packed)
        tl.store(total_ptr + place, total, mask=is_packed)
        places = place[:, None] * BLOCK_P + lanes[None, :]
        tl.store(values_ptr + places, values, mask=is_packed[:, None])
        tl.debug_barrier()
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == high - low
        if is_last:
            tl.store(counter, 0)
            total, values = combine_segments(
                values_ptr, maximum_ptr, total_ptr, base, is_packed, first_segments, last_segments,
                low, high, FOLDED, BLOCK_M, BLOCK_P,
            )  # fmt: skip
    return is_last, total, values
