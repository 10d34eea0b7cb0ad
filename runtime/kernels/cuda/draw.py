"""Draws of a round on CUDA, from logits to columns in three launches.

The first takes the peak of each tile of ids, the second adds noise to (logit - peak of the row) /
temperature and keeps the best (score, lowest column) of each tile, the third picks among tiles.
What a row's request asks for is read where it lies, by row -> request -> slot. Operations and their
order are those of `runtime.kernels.law.scale_rows` and `runtime.kernels.noise`: no product is fused
with a sum, and maxima are exact in any order.

Legend: M rows, V columns, P tiles of peaks, T tiles of draws, S slots, B requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.batch import RoundSampling
from runtime.kernels.cuda.device import ceil_div, inner_contiguous, overlap_options
from runtime.kernels.cuda.sample import SAMPLE_BLOCK, launch_pick, token_noise

PEAK_BLOCK = 4096
_PEAKS_BLOCK = tl.constexpr(64)  # 262_144 ids, then one more step
_EMPTIED = tl.constexpr(256)
_NO_COLUMN = tl.constexpr(2147483647)
_HIGHEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def comparable(values):
    """`runtime.kernels.law.comparable`."""
    values = tl.where(values == values, values, float("-inf"))
    return tl.where(values == float("inf"), _HIGHEST, values)


@triton.jit(do_not_specialize=["num_columns", "num_peaks", "stride_logits"])
def peak_tile_kernel(
    logits_ptr, peak_ptr, counts_ptr, masses_ptr, num_columns, num_peaks, stride_logits,
    BINS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Highest comparable logit of one tile of one row; a row's BINS, if any, are emptied."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(
        logits_ptr + row * stride_logits + columns, mask=columns < num_columns, other=float("-inf")
    )
    tl.store(peak_ptr + row * num_peaks + tile, tl.max(comparable(logits), axis=0))
    if BINS:
        for start in range(tile * _EMPTIED, BINS, num_peaks * _EMPTIED):
            cells = row * BINS + start + tl.arange(0, _EMPTIED)
            tl.store(counts_ptr + cells, tl.zeros((_EMPTIED,), dtype=tl.int32))
            tl.store(masses_ptr + cells, tl.zeros((_EMPTIED,), dtype=tl.int64))


@triton.jit
def row_peak(peak_ptr, row, num_peaks):
    """Highest of a row's peaks, finite."""
    lanes = tl.arange(0, _PEAKS_BLOCK)
    highest = tl.full((_PEAKS_BLOCK,), -_HIGHEST, dtype=tl.float32)
    for start in range(0, num_peaks, _PEAKS_BLOCK):
        mask = start + lanes < num_peaks
        place = peak_ptr + row * num_peaks + start + lanes
        highest = tl.maximum(highest, tl.load(place, mask=mask, other=float("-inf")))
    return tl.max(highest, axis=0)


@triton.jit
def row_cell(
    request_ptr, slots_ptr, row, num_requests, HAS_REQUESTS: tl.constexpr, HAS_SLOTS: tl.constexpr
):
    """Cell of the columns that a row's request has."""
    request = row
    if HAS_REQUESTS:
        request = tl.minimum(tl.load(request_ptr + row), num_requests - 1).to(tl.int64)
    if HAS_SLOTS:
        request = tl.load(slots_ptr + request)
    return request


@triton.jit(
    do_not_specialize=["num_columns", "num_peaks", "num_tiles", "num_requests", "stride_logits"],
    do_not_specialize_on_alignment=["request_ptr", "slots_ptr", "position_ptr"],
)
def draw_tile_kernel(
    logits_ptr, peak_ptr, request_ptr, slots_ptr, position_ptr,
    is_sampled_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, temperature_ptr, noise_ids_ptr,
    top_ptr, column_ptr, num_columns, num_peaks, num_tiles, num_requests, stride_logits,
    KIND: tl.constexpr, HAS_REQUESTS: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (score, lowest column) of one tile of one row."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    logits = tl.load(logits_ptr + row * stride_logits + columns, mask=mask, other=float("-inf"))
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
    peak = row_peak(peak_ptr, row, num_peaks)
    temperature = tl.load(temperature_ptr + cell) + tl.zeros_like(logits)
    scores = tl.div_rn(comparable(logits) - peak, temperature) + noise
    best = tl.max(scores, axis=0)
    column = tl.min(tl.where(mask & (scores == best), columns, _NO_COLUMN), axis=0)
    tl.store(top_ptr + row * num_tiles + tile, best)
    tl.store(column_ptr + row * num_tiles + tile, column)


def launch_draw(
    logits_MV: torch.Tensor,
    sampling: RoundSampling,
    request_M: torch.Tensor | None,
    position_M: torch.Tensor,
    kind: int,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `draw_tokens` without filters."""
    logits_MV = inner_contiguous(logits_MV)
    num_rows, num_columns = logits_MV.shape
    device = logits_MV.device
    out_M = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out_M
    num_peaks, num_tiles = ceil_div(num_columns, PEAK_BLOCK), ceil_div(num_columns, SAMPLE_BLOCK)
    peak_MP = torch.empty((num_rows, num_peaks), dtype=torch.float32, device=device)
    best_MT = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device)
    column_MT = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    position_M, slots_B = position_M.contiguous(), sampling.slots_B
    is_overlapping, options = overlap_options(device, None)
    peak_tile_kernel[(num_rows, num_peaks)](
        logits_MV, peak_MP, column_MT, position_M, num_columns, num_peaks, logits_MV.stride(0),
        **peak_constants(), OVERLAP=is_overlapping, num_warps=8, **options,
    )  # fmt: skip
    draw_tile_kernel[(num_rows, num_tiles)](
        logits_MV,
        peak_MP,
        column_MT if request_M is None else request_M.contiguous(),
        position_M if slots_B is None else slots_B,
        position_M,
        sampling.is_sampled_S,
        sampling.seed_low_S,
        sampling.seed_high_S,
        sampling.choice_index_S,
        sampling.temperature_S,
        position_M if names_V is None else names_V.contiguous(),
        best_MT,
        column_MT,
        num_columns,
        num_peaks,
        num_tiles,
        (sampling.is_sampled_S if slots_B is None else slots_B).shape[0],
        logits_MV.stride(0),
        **draw_constants(
            kind,
            has_requests=request_M is not None,
            has_slots=slots_B is not None,
            has_ids=names_V is not None,
        ),
        OVERLAP=is_overlapping,
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )
    launch_pick(best_MT, column_MT, out_M, names_V, copy_M)
    return out_M


def peak_constants(*, num_bins: int = 0) -> dict[str, int]:
    """Return the compile-time arguments of `peak_tile_kernel`."""
    return {"BINS": num_bins, "BLOCK": PEAK_BLOCK}


def draw_constants(
    kind: int, *, has_requests: bool, has_slots: bool, has_ids: bool
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `draw_tile_kernel`."""
    return {
        "KIND": int(kind),
        "HAS_REQUESTS": has_requests,
        "HAS_SLOTS": has_slots,
        "HAS_IDS": has_ids,
        "BLOCK": SAMPLE_BLOCK,
    }
