"""Filtered draws of a round on CUDA without sorting: five launches whatever the filters are.

1. Peaks of tiles of ids, and empty bins. 2. Log weights; those of rows with top-k or top-p are
counted, and their masses summed, in bins of like values. 3. The border of each row. 4. Best (score,
lowest column) of each tile among what is kept. 5. The choice among tiles.

What filters keep of a row is a prefix of its ids by (value descending, id ascending), so one key
says it all: the distance from the peak in its high 32 bits, the id in the low ones. Distances are
floats of one sign, whose bits have their order. Bins say in which of them a border lies; the ids of
those bins are listed and searched by halving, distances first, then ids of equal distance. Counts
and masses are integers, so their sums have no order: the border is that of
`runtime.kernels.law.filter_rows`, compared in the same float64 numbers. No id that has no weight is
counted, and what it would be kept by does not matter.

Legend: M rows, V columns, P tiles of peaks, T tiles of draws, K bins, S slots, B requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.batch import RoundSampling
from runtime.kernels.cuda.device import ceil_div, inner_contiguous, overlap_options
from runtime.kernels.cuda.draw import (
    PEAK_BLOCK,
    comparable,
    draw_constants,
    peak_constants,
    peak_tile_kernel,
    row_cell,
    row_peak,
)
from runtime.kernels.cuda.exact_exp import mass_of
from runtime.kernels.cuda.sample import SAMPLE_BLOCK, launch_pick, token_noise

NUM_BINS = 4096
SCAN_BLOCK = 4096
LIST_BLOCK = 1024
BORDER_WARPS = 16
_NUM_BINS = tl.constexpr(NUM_BINS)
_BIN_SHIFT = tl.constexpr(16)  # 7 bits of the mantissa: 128 bins between powers of two
_FIRST_BIN = tl.constexpr((127 - 13) << 7)  # from 2**-13 up to 2**19; what is beyond joins the ends
_NO_WEIGHT = tl.constexpr(0x7F800000)  # distance of -inf
_NO_ID = tl.constexpr(0x7FFFFFFF)
_KEEPS_ALL = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def distance_of(scaled):
    """How far log weights, which are 0 or less, lie from the peak, as int32 of the same order."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def bin_of(distance):
    """Bin of a distance; bins ascend with distances."""
    return tl.minimum(tl.maximum((distance >> _BIN_SHIFT) - _FIRST_BIN, 0), _NUM_BINS - 1)


@triton.jit(
    do_not_specialize=["num_columns", "num_peaks", "num_requests", "stride_logits"],
    do_not_specialize_on_alignment=["request_ptr", "slots_ptr"],
)
def weigh_tile_kernel(
    logits_ptr, peak_ptr, request_ptr, slots_ptr, temperature_ptr, top_k_ptr, log_min_p_ptr,
    top_p_ptr, scaled_ptr, counts_ptr, masses_ptr, num_columns, num_peaks, num_requests,
    stride_logits,
    HAS_REQUESTS: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Log weights of one tile of one row; top-k's counts and top-p's masses go to bins."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    logits = tl.load(logits_ptr + row * stride_logits + columns, mask=mask, other=float("-inf"))
    cell = row_cell(request_ptr, slots_ptr, row, num_requests, HAS_REQUESTS, HAS_SLOTS)
    temperature = tl.load(temperature_ptr + cell) + tl.zeros_like(logits)
    peak = row_peak(peak_ptr, row, num_peaks)
    scaled = tl.div_rn(comparable(logits) - peak, temperature)
    tl.store(scaled_ptr + row * num_columns + columns, scaled, mask=mask)
    distance = distance_of(scaled)
    has_weight = mask & (distance < _NO_WEIGHT)
    cells = row * _NUM_BINS + bin_of(distance)
    if tl.load(top_k_ptr + cell) < num_columns:
        tl.atomic_add(
            counts_ptr + cells, tl.full((BLOCK,), 1, tl.int32), mask=has_weight, sem="relaxed"
        )
    if tl.load(top_p_ptr + cell) < 1.0:
        mass = mass_of(scaled)
        is_summed = has_weight & (scaled >= tl.load(log_min_p_ptr + cell)) & (mass > 0)
        tl.atomic_add(masses_ptr + cells, mass, mask=is_summed, sem="relaxed")


@triton.jit
def listed(list_ptr, scaled_ptr, start, num_listed, BLOCK: tl.constexpr):
    """A block of a row's list: ids, log weights, distances, keys, and which of them there are."""
    mask = start + tl.arange(0, BLOCK) < num_listed
    ids = tl.load(list_ptr + start + tl.arange(0, BLOCK), mask=mask, other=0)
    scaled = tl.load(scaled_ptr + ids, mask=mask, other=float("-inf"))
    distance = distance_of(scaled)
    key = (distance.to(tl.int64) << 32) | ids.to(tl.int64)
    return ids, scaled, distance, key, mask


@triton.jit
def measured(
    list_ptr, scaled_ptr, num_listed, of_bin, limit, lowest, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Number, or mass without what is below `lowest`, of a bin's ids with keys up to a limit."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, num_listed, BLOCK):
        _, scaled, distance, key, mask = listed(list_ptr, scaled_ptr, start, num_listed, BLOCK)
        mask = mask & (bin_of(distance) == of_bin) & (key <= limit)
        if BY_MASS:
            part = tl.where(mask & (scaled >= lowest), mass_of(scaled), 0)
        else:
            part = mask.to(tl.int64)
        total += tl.sum(part, axis=0)
    return total


@triton.jit
def border_key(
    list_ptr, scaled_ptr, num_listed, of_bin, limit, lowest, before, needed,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lowest key of a bin with which `before` and what is measured reach what is needed.

    It is that of an id in the bin, `limit` at most.
    """
    low = tl.full((), _NO_ID, tl.int32)
    high = tl.full((), 0, tl.int32)
    for start in range(0, num_listed, BLOCK):
        _, _, distance, key, mask = listed(list_ptr, scaled_ptr, start, num_listed, BLOCK)
        mask = mask & (bin_of(distance) == of_bin) & (key <= limit)
        low = tl.minimum(low, tl.min(tl.where(mask, distance, _NO_ID), axis=0))
        high = tl.maximum(high, tl.max(tl.where(mask, distance, 0), axis=0))
    while low < high:
        middle = low + (high - low) // 2
        bound = tl.minimum((middle.to(tl.int64) << 32) | 0xFFFFFFFF, limit)
        total = before + measured(
            list_ptr, scaled_ptr, num_listed, of_bin, bound, lowest, BY_MASS, BLOCK
        )
        is_reached = total.to(tl.float64) >= needed
        low = tl.where(is_reached, low, middle + 1)
        high = tl.where(is_reached, middle, high)
    distance_key = low.to(tl.int64) << 32
    first = tl.full((), _NO_ID, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, num_listed, BLOCK):
        ids, _, distance, key, mask = listed(list_ptr, scaled_ptr, start, num_listed, BLOCK)
        mask = mask & (distance == low) & (key <= limit)
        first = tl.minimum(first, tl.min(tl.where(mask, ids, _NO_ID), axis=0))
        last = tl.maximum(last, tl.max(tl.where(mask, ids, 0), axis=0))
    while first < last:
        middle = first + (last - first) // 2
        total = before + measured(
            list_ptr, scaled_ptr, num_listed, of_bin, distance_key | middle.to(tl.int64), lowest,
            BY_MASS, BLOCK,
        )  # fmt: skip
        is_reached = total.to(tl.float64) >= needed
        first = tl.where(is_reached, first, middle + 1)
        last = tl.where(is_reached, middle, last)
    return distance_key | first.to(tl.int64)


@triton.jit
def first_bin(bins, sums, needed):
    """First bin up to which a sum, as float64, reaches what is needed."""
    return tl.min(tl.where(sums.to(tl.float64) >= needed, bins, _NUM_BINS - 1), axis=0)


@triton.jit(
    do_not_specialize=["num_columns", "num_requests"],
    do_not_specialize_on_alignment=["request_ptr", "slots_ptr"],
)
def border_kernel(
    scaled_ptr, counts_ptr, masses_ptr, request_ptr, slots_ptr, top_k_ptr, log_min_p_ptr,
    top_p_ptr, list_ptr, border_ptr, num_columns, num_requests,
    HAS_REQUESTS: tl.constexpr, HAS_SLOTS: tl.constexpr, BINS: tl.constexpr, SCAN: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Highest key that top-k and top-p keep of one row."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cell = row_cell(request_ptr, slots_ptr, row, num_requests, HAS_REQUESTS, HAS_SLOTS)
    top_k, top_p = tl.load(top_k_ptr + cell), tl.load(top_p_ptr + cell)
    lowest = tl.load(log_min_p_ptr + cell)
    border = tl.full((), _KEEPS_ALL, tl.int64)
    has_k, has_p = top_k < num_columns, top_p < 1.0
    if has_k | has_p:
        scaled_ptr += row * num_columns
        list_ptr += row * num_columns
        bins = tl.arange(0, BINS)
        counts = tl.load(counts_ptr + row * BINS + bins).to(tl.int64)
        has_k = has_k & (tl.sum(counts, axis=0) > top_k)
        bin_k = first_bin(bins, tl.cumsum(counts, axis=0), top_k.to(tl.float64))
        bin_k = tl.where(has_k, bin_k, BINS)
        masses = tl.load(masses_ptr + row * BINS + bins)
        sums = tl.cumsum(masses, axis=0)
        sure = tl.sum(tl.where(bins < bin_k, masses, 0), axis=0)
        most = tl.sum(tl.where(bins <= bin_k, masses, 0), axis=0)
        first = tl.where(has_p, first_bin(bins, sums, sure.to(tl.float64) * top_p), BINS)
        last = tl.where(has_p, first_bin(bins, sums, most.to(tl.float64) * top_p), -1)
        num_listed = tl.full((), 0, tl.int32)
        for start in range(0, num_columns, SCAN):
            columns = start + tl.arange(0, SCAN)
            mask = columns < num_columns
            scaled = tl.load(scaled_ptr + columns, mask=mask, other=float("-inf"))
            distance = distance_of(scaled)
            place = bin_of(distance)
            is_listed = (place == bin_k) | ((place >= first) & (place <= last))
            is_listed = (is_listed & (distance < _NO_WEIGHT)).to(tl.int32)
            places = num_listed + tl.cumsum(is_listed, axis=0) - is_listed
            tl.store(list_ptr + places, columns, mask=is_listed != 0)
            num_listed += tl.sum(is_listed, axis=0)
        tl.debug_barrier()  # what other threads listed is read below
        total = sure
        if has_k:
            before = tl.sum(tl.where(bins < bin_k, counts, 0), axis=0)
            border = border_key(
                list_ptr, scaled_ptr, num_listed, bin_k, border, lowest, before,
                top_k.to(tl.float64), False, BLOCK,
            )  # fmt: skip
            if has_p:
                total += measured(
                    list_ptr, scaled_ptr, num_listed, bin_k, border, lowest, True, BLOCK
                )
        if has_p:
            share = total.to(tl.float64) * top_p
            bin_p = first_bin(bins, sums, share)
            before = tl.sum(tl.where(bins < bin_p, masses, 0), axis=0)
            border = border_key(
                list_ptr, scaled_ptr, num_listed, bin_p, border, lowest, before, share, True, BLOCK
            )
    tl.store(border_ptr + row, border)


@triton.jit(
    do_not_specialize=["num_columns", "num_tiles", "num_requests"],
    do_not_specialize_on_alignment=["request_ptr", "slots_ptr", "position_ptr"],
)
def kept_tile_kernel(
    scaled_ptr, border_ptr, request_ptr, slots_ptr, position_ptr,
    is_sampled_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, log_min_p_ptr, noise_ids_ptr,
    top_ptr, column_ptr, num_columns, num_tiles, num_requests,
    KIND: tl.constexpr, HAS_REQUESTS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (score, lowest column) of one tile of one row, among what its filters keep."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    scaled = tl.load(scaled_ptr + row * num_columns + columns, mask=mask, other=float("-inf"))
    if HAS_IDS:  # noqa: SIM108 - a compile-time branch
        ids = tl.load(noise_ids_ptr + columns, mask=mask, other=0)
    else:
        ids = columns.to(tl.int64)
    cell = row_cell(request_ptr, slots_ptr, row, num_requests, HAS_REQUESTS, HAS_SLOTS)
    noise = token_noise(
        ids, tl.load(position_ptr + row) + 1, tl.load(choice_ptr + cell),
        tl.load(seed_low_ptr + cell), tl.load(seed_high_ptr + cell), KIND,
    )  # fmt: skip
    noise = tl.where(tl.load(is_sampled_ptr + cell), noise, 0.0)
    key = (distance_of(scaled).to(tl.int64) << 32) | columns.to(tl.int64)
    is_kept = (key <= tl.load(border_ptr + row)) & (scaled >= tl.load(log_min_p_ptr + cell))
    scores = tl.where(is_kept, scaled, float("-inf")) + noise
    best = tl.max(scores, axis=0)
    column = tl.min(tl.where(mask & (scores == best), columns, _NO_ID), axis=0)
    tl.store(top_ptr + row * num_tiles + tile, best)
    tl.store(column_ptr + row * num_tiles + tile, column)


def launch_filtered_draw(
    logits_MV: torch.Tensor,
    sampling: RoundSampling,
    request_M: torch.Tensor | None,
    position_M: torch.Tensor,
    kind: int,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `draw_tokens` with filters."""
    logits_MV = inner_contiguous(logits_MV)
    num_rows, num_columns = logits_MV.shape
    out_M = logits_MV.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return out_M
    num_tiles, slots_B = ceil_div(num_columns, SAMPLE_BLOCK), sampling.slots_B
    position_M = position_M.contiguous()
    request = position_M if request_M is None else request_M.contiguous()
    slots = position_M if slots_B is None else slots_B
    num_requests = (sampling.is_sampled_S if slots_B is None else slots_B).shape[0]
    owners = {"HAS_REQUESTS": request_M is not None, "HAS_SLOTS": slots_B is not None}
    scaled_MV, border_M = launch_borders(logits_MV, sampling, request, slots, num_requests, owners)
    best_MT = logits_MV.new_empty((num_rows, num_tiles))
    column_MT = logits_MV.new_empty((num_rows, num_tiles), dtype=torch.int32)
    is_overlapping, options = overlap_options(logits_MV.device, None)
    kept_tile_kernel[(num_rows, num_tiles)](
        scaled_MV, border_M, request, slots, position_M,
        sampling.is_sampled_S, sampling.seed_low_S, sampling.seed_high_S, sampling.choice_index_S,
        sampling.log_min_p_S, position_M if names_V is None else names_V.contiguous(),
        best_MT, column_MT, num_columns, num_tiles, num_requests,
        **draw_constants(
            kind, has_requests=request_M is not None, has_slots=slots_B is not None,
            has_ids=names_V is not None,
        ),
        OVERLAP=is_overlapping, num_warps=4, enable_fp_fusion=False, **options,
    )  # fmt: skip
    launch_pick(best_MT, column_MT, out_M, names_V, copy_M)
    return out_M


def launch_borders(
    logits_MV: torch.Tensor,
    sampling: RoundSampling,
    request: torch.Tensor,
    slots: torch.Tensor,
    num_requests: int,
    owners: dict[str, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch what makes fp32 log weights [M, V] and int64 borders [M]."""
    num_rows, num_columns = logits_MV.shape
    num_peaks = ceil_div(num_columns, PEAK_BLOCK)
    peak_MP = logits_MV.new_empty((num_rows, num_peaks))
    counts_MK = logits_MV.new_empty((num_rows, NUM_BINS), dtype=torch.int32)
    masses_MK = logits_MV.new_empty((num_rows, NUM_BINS), dtype=torch.int64)
    scaled_MV = logits_MV.new_empty((num_rows, num_columns))
    list_MV = logits_MV.new_empty((num_rows, num_columns), dtype=torch.int32)
    border_M = logits_MV.new_empty(num_rows, dtype=torch.int64)
    is_overlapping, options = overlap_options(logits_MV.device, None)
    filters = (sampling.top_k_S, sampling.log_min_p_S, sampling.top_p_S)
    peak_tile_kernel[(num_rows, num_peaks)](
        logits_MV, peak_MP, counts_MK, masses_MK, num_columns, num_peaks, logits_MV.stride(0),
        **peak_constants(num_bins=NUM_BINS), OVERLAP=is_overlapping, num_warps=8, **options,
    )  # fmt: skip
    weigh_tile_kernel[(num_rows, ceil_div(num_columns, SAMPLE_BLOCK))](
        logits_MV, peak_MP, request, slots, sampling.temperature_S, *filters,
        scaled_MV, counts_MK, masses_MK, num_columns, num_peaks, num_requests, logits_MV.stride(0),
        **owners, BLOCK=SAMPLE_BLOCK, OVERLAP=is_overlapping, num_warps=4, enable_fp_fusion=False,
        **options,
    )  # fmt: skip
    border_kernel[(num_rows,)](
        scaled_MV, counts_MK, masses_MK, request, slots, *filters,
        list_MV, border_M, num_columns, num_requests,
        **owners, **border_constants(), OVERLAP=is_overlapping, num_warps=BORDER_WARPS,
        enable_fp_fusion=False, **options,
    )  # fmt: skip
    return scaled_MV, border_M


def border_constants() -> dict[str, int]:
    """Return the compile-time sizes of `border_kernel`."""
    return {"BINS": NUM_BINS, "SCAN": SCAN_BLOCK, "BLOCK": LIST_BLOCK}
