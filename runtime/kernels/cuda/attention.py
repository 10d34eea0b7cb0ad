"""Paged attention on CUDA: one program per rows of a request, key head and segment.

A program packs the query heads of a key head, and rows of one request where the batch says which
lie together, into one product. Every row keeps its own limit and a masked key adds exactly +0, so
neither rows nor requests beside it reach its bits. The softmax's denominator is a product with
ones: its order of summation is that of K, whatever the number of rows. With more than one segment
the last program to arrive combines them in order; arrivals are counted in integers.

Legend: M rows, H query heads, G key heads, P head size, S segments of the longest request, W rows
of each request of a dense batch, T table positions, U row tiles, N packed rows times heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.batch import ROW_TILE_ROWS, PreparedBatch
from runtime.kernels.cuda.attention_steps import (
    attend_segment,
    attend_stored,
    fold_segment,
    join_segments,
)
from runtime.kernels.cuda.device import (
    ceil_div,
    device_arch,
    inner_contiguous,
    overlap_options,
    power_of_two,
)
from runtime.kernels.gemm_table import attention_tile
from runtime.kernels.norm import HeadNorms
from runtime.kernels.rows import attention_segment
from runtime.kernels.tile_rules import Overlap, num_sms
from runtime.kv import KVLayer

SEGMENT_WARPS = 8
CROWDED_WARPS = 4
"""Of a program where there are more programs than multiprocessors: two of them share one."""

FOLDED = tl.constexpr(4)
"""Stored segments that the last program loads together: each trip is some 0.7 us."""

SEGMENT_OVERLAP: Overlap = "started"
_NEARLY_ALL = 32  # one multiprocessor in so many may stay without rows
_PARTIAL_BYTES = 1 << 28
_NO_WINDOW = 1 << 30  # keys; no position leaves it, so both cases share one binary
_MOST_PACKED = 64  # query heads times rows in one product
_NARROW_HEAD = 64


@triton.jit
def _program_rows(
    tiles_ptr, tile, WIDTH: tl.constexpr, PART_ROWS: tl.constexpr, PARTS: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """Return the first row of a program's group, its first row within it, and its last one + 1."""
    group = tile // PARTS
    first_row = group * WIDTH
    num_rows = WIDTH
    if TILED:
        first_row = tl.load(tiles_ptr + 2 * group).to(tl.int64)
        num_rows = tl.load(tiles_ptr + 2 * group + 1)
    part = (tile % PARTS * PART_ROWS).to(tl.int32)
    return first_row, part, tl.minimum(num_rows, part + PART_ROWS)


@triton.jit(do_not_specialize=["tile_start", "num_segments", "window", "stride_table"])
def attention_segment_kernel(
    q_ptr, k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, positions_ptr, windows_ptr, limits_ptr,
    slots_ptr, row_request_ptr, table_ptr, tiles_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr,
    values_ptr, maximum_ptr, total_ptr, arrivals_ptr, out_ptr,
    scale_log2, norm_eps, tile_start, num_segments, window,
    stride_qm, stride_qh, stride_km, stride_kg, stride_vm, stride_vg, stride_table,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr, SEGMENT_KEYS: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, PART_ROWS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_P: tl.constexpr, TILED: tl.constexpr, FUSED: tl.constexpr, NORMED: tl.constexpr,
    SINGLE: tl.constexpr, IN_TURN: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted values [M, H, P] for the rows and query heads of a program.

    Unless the segment is the only one, its values, maximum and total (float32, base-2 scores) go to
    [U, G, S, N], and the last of the programs that share rows combines. Fused, queries and keys
    come unrotated, and unnormed if NORMED, and the program stores the new keys and values that it
    is about to read. A program without keys ends at once; of those that share rows at least one has
    some, and waits.
    """
    local_tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()
    first_row, part, part_end = _program_rows(
        tiles_ptr, tile_start + local_tile, WIDTH, PART_ROWS, PARTS, TILED
    )
    packed = tl.arange(0, BLOCK_M)
    is_row = part + packed // GROUP < part_end
    rows = first_row + part + packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    limits = tl.load(limits_ptr + rows, mask=is_row, other=-1).to(tl.int32)
    windows = tl.load(windows_ptr + rows, mask=is_row, other=0).to(tl.int32)
    first_keys = tl.maximum(windows - window + 1, 0)
    least_key = tl.min(tl.where(is_row, first_keys, 2147483647), axis=0)
    last_key = tl.max(limits, axis=0)
    first_segment = least_key // SEGMENT_KEYS
    if IN_TURN:
        segment = first_segment
    begin = tl.maximum(segment * SEGMENT_KEYS, least_key // TILE * TILE)
    end = tl.minimum((segment + 1) * SEGMENT_KEYS, last_key + 1)
    if begin < end:
        lanes = tl.arange(0, BLOCK_HALF)[None, :]
        request = tl.load(row_request_ptr + first_row).to(tl.int64)
        table_row = table_ptr + request * stride_table
        positions = tl.load(positions_ptr + rows, mask=is_row, other=0)
        offsets = tl.arange(0, BLOCK_W)
        new_rows = first_row + offsets
        new_keys = tl.load(positions_ptr + new_rows, mask=offsets < WIDTH, other=2147483647)
        is_mine = offsets < WIDTH
        if not IN_TURN:
            is_mine = is_mine & (new_keys // SEGMENT_KEYS == segment)
        maximum, total, values, q_low, q_high = attend_segment(
            q_ptr + rows[:, None] * stride_qm + heads[:, None] * stride_qh + lanes,
            is_row[:, None] & (lanes < HEAD_DIM // 2),
            cos_sin_ptr + positions[:, None] * HEAD_DIM + lanes,
            k_ptr + new_rows[:, None] * stride_km + kv_head * stride_kg + lanes,
            v_ptr + new_rows[:, None] * stride_vm + kv_head * stride_vg + lanes,
            is_mine[:, None] & (lanes < HEAD_DIM // 2),
            cos_sin_ptr + new_keys[:, None] * HEAD_DIM + lanes,
            tl.load(slots_ptr + new_rows, mask=is_mine, other=0),
            k_pool_ptr, v_pool_ptr, table_row,
            begin, end, least_key, tl.min(new_keys, axis=0) if FUSED else 2147483647,
            limits, first_keys, kv_head, scale_log2, q_norm_ptr, k_norm_ptr, norm_eps,
            KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, EARLY, TILE, BLOCK_M, BLOCK_W,
            BLOCK_HALF, BLOCK_P, FUSED, NORMED, OVERLAP,
        )  # fmt: skip
        is_whole = True
        if IN_TURN:
            for later in range(first_segment + 1, last_key // SEGMENT_KEYS + 1):
                part_maximum, part_total, part_values = attend_stored(
                    q_low, q_high, k_pool_ptr, v_pool_ptr, table_row, later * SEGMENT_KEYS,
                    tl.minimum((later + 1) * SEGMENT_KEYS, last_key + 1), least_key, limits,
                    first_keys, kv_head, scale_log2, KV_HEADS, HEAD_DIM, KV_BLOCK_SIZE, TILE,
                    BLOCK_M, BLOCK_HALF, BLOCK_P,
                )  # fmt: skip
                maximum, total, values = fold_segment(
                    maximum, total, values, part_maximum, part_total, part_values, later,
                    first_keys // SEGMENT_KEYS, limits // SEGMENT_KEYS, BLOCK_M, BLOCK_P,
                )  # fmt: skip
        elif not SINGLE:
            is_whole, total, values = join_segments(
                maximum, total, values, values_ptr, maximum_ptr, total_ptr,
                arrivals_ptr + local_tile * KV_HEADS + kv_head,
                (local_tile * KV_HEADS + kv_head) * num_segments, segment,
                first_keys // SEGMENT_KEYS, limits // SEGMENT_KEYS,
                first_segment, last_key // SEGMENT_KEYS, PART_ROWS * GROUP,
                TILED, FOLDED, BLOCK_M, BLOCK_P,
            )  # fmt: skip
        if is_whole:
            all_lanes = tl.arange(0, BLOCK_P)
            out = out_ptr + (rows * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM
            mixed = (values / total[:, None]).to(out_ptr.dtype.element_ty)
            mask = is_row[:, None] & (all_lanes < HEAD_DIM)[None, :]
            tl.store(out + all_lanes[None, :], mixed, mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRows:
    """What a fused launch reads besides queries: keys before norm and rotation, and the like."""

    k_MGP: torch.Tensor
    v_MGP: torch.Tensor
    cos_sin_TP: torch.Tensor
    norms: HeadNorms | None = None


def launch_paged_attention(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    *,
    scale: float,
    window: int | None = None,
    new: NewRows | None = None,
    overlap: bool | None = None,
    segment: int | None = None,
    in_turn: bool | None = None,
) -> torch.Tensor:
    """Launch `paged_attention`, or with `new` the fused `attend_new_rows` of a dense batch.

    `overlap` and `in_turn` replace what is chosen (tests, tuning). A `segment`, a power of two,
    other than `attention_segment` sums in another order (benchmarks only).
    """
    is_whole = layer.k.is_contiguous() and layer.v.is_contiguous()
    assert is_whole, "each pool is one block of memory"
    assert batch.block_tables_BT.stride(1) == 1, "block tables are read entry by entry"
    assert new is None or batch.rows_per_request, "only a dense batch is fused"
    q_MHP = inner_contiguous(q_MHP)
    _, num_heads, head_dim = q_MHP.shape
    _, num_kv_heads, kv_block_size, _ = layer.k.shape
    tiles = batch.tiles_U2 if batch.rows_per_request is None else None
    width = ROW_TILE_ROWS if tiles is not None else batch.rows_per_request or 1
    constants = segment_constants(
        num_heads, num_kv_heads, head_dim, kv_block_size, width, q_MHP.element_size(), segment
    )
    groups = tiles.shape[0] if tiles is not None else q_MHP.shape[0] // width
    num_tiles = groups * constants["PARTS"]
    num_segments = ceil_div(batch.max_length, constants["SEGMENT_KEYS"])
    if in_turn is None:
        in_turn = num_segments > 1 and rows_fill(q_MHP.device, num_tiles * num_kv_heads)
    num_parts = 1 if in_turn else num_segments
    out = torch.empty_like(q_MHP, memory_format=torch.contiguous_format)
    # Chunks bound the partials of a long prefill; tiles are independent, so cuts change no bits.
    tile_bytes = num_kv_heads * num_parts * constants["BLOCK_M"] * constants["BLOCK_P"] * 4
    chunk = num_tiles if num_parts == 1 else max(1, _PARTIAL_BYTES // tile_bytes)
    for start in range(0, num_tiles, max(chunk, 1)):
        _launch_tiles(
            q_MHP, layer, batch, out, start, min(chunk, num_tiles - start), num_parts, constants,
            scale=scale, window=window, new=new, overlap=overlap,
        )  # fmt: skip
    return out


def _launch_tiles(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    out_MHP: torch.Tensor,
    tile_start: int,
    num_tiles: int,
    num_parts: int,
    constants: dict[str, int],
    *,
    scale: float,
    window: int | None,
    new: NewRows | None,
    overlap: bool | None,
) -> None:
    num_kv_heads, block_m = constants["KV_HEADS"], constants["BLOCK_M"]
    is_single = batch.max_length <= constants["SEGMENT_KEYS"]
    is_split = num_parts > 1
    shape = (num_tiles, num_kv_heads, num_parts, block_m) if is_split else (0,)
    values = q_MHP.new_empty((*shape, constants["BLOCK_P"]), dtype=torch.float32)
    maximum, total = (q_MHP.new_empty(shape, dtype=torch.float32) for _ in range(2))
    own = batch.positions_N
    is_tiled = batch.rows_per_request is None and batch.tiles_U2 is not None
    k, v = (q_MHP, q_MHP) if new is None else (new.k_MGP, new.v_MGP)
    norms = None if new is None else new.norms
    overlapped, options = overlap_options(q_MHP.device, overlap, SEGMENT_OVERLAP)
    in_turn = not is_single and not is_split
    num_programs = num_tiles * num_kv_heads * num_parts
    num_warps = segment_warps(q_MHP.device, num_programs, in_turn=in_turn)
    attention_segment_kernel[(num_tiles, num_kv_heads, num_parts)](
        q_MHP,
        k,
        v,
        layer.k,
        layer.v,
        own,
        own if batch.window_positions_N is None else batch.window_positions_N,
        own if batch.limits_N is None else batch.limits_N,
        batch.slots_N,
        batch.row_request_N,
        batch.block_tables_BT,
        batch.tiles_U2 if is_tiled else batch.row_request_N,
        q_MHP if new is None else new.cos_sin_TP,
        q_MHP if norms is None else norms.q_P,
        q_MHP if norms is None else norms.k_P,
        values,
        maximum,
        total,
        _arrivals(batch, num_tiles * num_kv_heads if is_split else 0),
        out_MHP,
        scale * math.log2(math.e),
        0.0 if norms is None else norms.eps,
        tile_start,
        num_parts,
        _NO_WINDOW if window is None else window,
        q_MHP.stride(0),
        q_MHP.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        batch.block_tables_BT.stride(0),
        **constants,
        TILED=is_tiled,
        FUSED=new is not None,
        NORMED=norms is not None,
        SINGLE=is_single,
        IN_TURN=in_turn,
        EARLY=loads_early(constants, num_warps, is_single=is_single),
        OVERLAP=overlapped,
        num_warps=num_warps,
        **options,
    )


def _arrivals(batch: PreparedBatch, count: int) -> torch.Tensor:
    """Return `count` zeros: the batch's counters, which every launch leaves at 0, or new ones."""
    counters = batch.arrivals_X
    if counters is not None and counters.shape[0] >= count:
        return counters
    return torch.zeros(count, dtype=torch.int32, device=batch.positions_N.device)


def rows_fill(device: torch.device, num_programs: int) -> bool:
    """Whether so many programs (row tiles times key heads) leave next to no multiprocessor free.

    Measured on an H200: where they do, a program takes all segments of its rows, which spares the
    parts their way through memory; elsewhere segments in programs of their own take less time.
    """
    count = num_sms(device_arch(device))
    return num_programs * _NEARLY_ALL >= count * (_NEARLY_ALL - 1)


def segment_warps(device: torch.device, num_programs: int, *, in_turn: bool) -> int:
    """Return the warps of a program; bits do not depend on them."""
    is_crowded = in_turn or num_programs > num_sms(device_arch(device))
    return CROWDED_WARPS if is_crowded else SEGMENT_WARPS


def loads_early(constants: dict[str, int], num_warps: int, *, is_single: bool) -> bool:
    """Whether a program asks for a segment's older keys before it waits; bits do not depend on it.

    One step must hold the segment. Few warps have no registers for wide heads' keys beside all
    else; with narrow ones, measured on an H200, it still pays where a segment is one of several.
    """
    if constants["TILE"] != constants["SEGMENT_KEYS"]:
        return False
    is_narrow = constants["HEAD_DIM"] <= _NARROW_HEAD
    return num_warps >= SEGMENT_WARPS or (is_narrow and not is_single)


def segment_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_block_size: int,
    width: int,
    element_bytes: int,
    segment: int | None = None,
) -> dict[str, int]:
    """Return the compile-time arguments of `attention_segment_kernel` that are no flags.

    `width` is the rows of each request of a dense batch, or the most rows of a row tile.
    """
    segment = attention_segment(head_dim) if segment is None else segment
    group = num_heads // num_kv_heads
    is_narrow = (
        head_dim <= _NARROW_HEAD and width >= ROW_TILE_ROWS
    )  # the new keys of a verify take registers
    packed = _MOST_PACKED if is_narrow else _MOST_PACKED // 2
    packed = packed if element_bytes == 2 else _MOST_PACKED // 4
    part_rows = min(width, max(1, packed // group))
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "KV_BLOCK_SIZE": kv_block_size,
        "SEGMENT_KEYS": segment,
        "TILE": min(segment, attention_tile(head_dim, element_bytes=element_bytes)),
        "WIDTH": width,
        "PART_ROWS": part_rows,
        "PARTS": ceil_div(width, part_rows),
        "BLOCK_W": power_of_two(width),
        "BLOCK_M": power_of_two(part_rows * group, at_least=16),
        "BLOCK_HALF": power_of_two(head_dim // 2, at_least=16),
        "BLOCK_P": power_of_two(head_dim, at_least=16),
    }
