"""Gumbel-max draws on CUDA: noise made in registers, one program per (row, tile of ids).

Operations and their order are those of `runtime.kernels.noise`; fusing a multiplication with an
addition is switched off, so the values have the twin's bits. Comparing (score, lowest column) is
exact in any order.

Legend: M rows, V columns, T tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div, inner_contiguous, overlap_options
from runtime.kernels.noise import NoiseRows

SAMPLE_BLOCK = 1024
PICK_BLOCK = 1024
_NO_COLUMN = tl.constexpr(2147483647)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _multiply_32(constant, x):
    """High and low 32 bits of a product of two numbers below 2**32, held in uint64."""
    product = x * constant
    return product >> 32, product & 0xFFFFFFFF


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10; all uint64 below 2**32."""
    for _ in tl.static_range(10):
        high_0, low_0 = _multiply_32(0xD2511F53, c0)
        high_1, low_1 = _multiply_32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@triton.jit
def exact_log(x):
    """`runtime.kernels.exact.exact_log` for normal float64."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_low = mantissa < _SQRT_HALF
    mantissa = tl.where(is_low, mantissa * 2.0, mantissa)
    power = exponent.to(tl.float64) - is_low.to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = tl.full(s.shape, 1.0 / 19.0, dtype=tl.float64)
    series = series * square + 1.0 / 17.0
    series = series * square + 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return power * _LN2 + (series * s) * 2.0


@triton.jit
def token_noise(ids, position, choice, seed_low, seed_high, KIND: tl.constexpr):
    """Gumbel noise, fp32, of int64 ids; what names a row's draws is int64, too."""
    c0 = (ids >> 2).to(tl.uint64)
    zero = tl.zeros_like(c0)
    w0, w1, w2, w3 = philox_words(
        c0, zero + position.to(tl.uint64), zero + KIND, zero + choice.to(tl.uint64),
        zero + seed_low.to(tl.uint64), zero + seed_high.to(tl.uint64),
    )  # fmt: skip
    lane = ids & 3
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    uniform = (word.to(tl.int64).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return (-exact_log(-exact_log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["num_columns", "num_tiles"])
def sample_tile_kernel(
    weights_ptr,
    seed_low_ptr,
    seed_high_ptr,
    choice_ptr,
    position_ptr,
    is_sampled_ptr,
    noise_ids_ptr,
    top_ptr,
    column_ptr,
    num_columns,
    num_tiles,
    stride_weights,
    KIND: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best (score, lowest column) of one tile of one row."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    weights = tl.load(weights_ptr + row * stride_weights + columns, mask=mask, other=float("-inf"))
    if HAS_IDS:  # noqa: SIM108 - a compile-time branch
        ids = tl.load(noise_ids_ptr + columns, mask=mask, other=0)
    else:
        ids = columns.to(tl.int64)
    noise = token_noise(
        ids, tl.load(position_ptr + row), tl.load(choice_ptr + row),
        tl.load(seed_low_ptr + row), tl.load(seed_high_ptr + row), KIND,
    )  # fmt: skip
    if HAS_FLAGS:
        noise = tl.where(tl.load(is_sampled_ptr + row), noise, 0.0)
    scores = weights + noise
    best = tl.max(scores, axis=0)
    column = tl.min(tl.where(mask & (scores == best), columns, _NO_COLUMN), axis=0)
    tl.store(top_ptr + row * num_tiles + tile, best)
    tl.store(column_ptr + row * num_tiles + tile, column)


@triton.jit(
    do_not_specialize=["num_tiles", "stride_copy"], do_not_specialize_on_alignment=["copy_ptr"]
)
def sample_pick_kernel(
    top_ptr, column_ptr, names_ptr, out_ptr, copy_ptr, num_tiles, stride_copy,
    NAMED: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (score, lowest column) over the tiles of one row; a column goes by its name, if any."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    first = tl.load(top_ptr + row * num_tiles)
    best = tl.full((BLOCK,), float("-inf"), dtype=first.dtype)
    columns = tl.full((BLOCK,), _NO_COLUMN, dtype=tl.int32)
    for start in range(0, num_tiles, BLOCK):
        mask = start + lanes < num_tiles
        place = row * num_tiles + start + lanes
        score = tl.load(top_ptr + place, mask=mask, other=float("-inf"))
        column = tl.load(column_ptr + place, mask=mask, other=_NO_COLUMN)
        is_better = (score > best) | ((score == best) & (column < columns))
        best = tl.where(is_better, score, best)
        columns = tl.where(is_better, column, columns)
    row_best = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == row_best, columns, _NO_COLUMN)).to(tl.int64)
    if NAMED:
        chosen = tl.load(names_ptr + chosen)
    tl.store(out_ptr + row, chosen)
    if COPIED:
        tl.store(copy_ptr + row * stride_copy, chosen)


def launch_sample(
    weights_MV: torch.Tensor,
    rows: NoiseRows,
    kind: int,
    is_sampled_M: torch.Tensor | None,
    noise_ids_V: torch.Tensor | None,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch `sample`."""
    weights_MV = inner_contiguous(weights_MV)
    num_rows, num_columns = weights_MV.shape
    device = weights_MV.device
    out_M = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out_M
    num_tiles = ceil_div(num_columns, SAMPLE_BLOCK)
    best_MT = torch.empty((num_rows, num_tiles), dtype=weights_MV.dtype, device=device)
    column_MT = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    position_M = rows.position_M.contiguous()
    is_overlapping, options = overlap_options(device, None)
    sample_tile_kernel[(num_rows, num_tiles)](
        weights_MV,
        rows.seed_low_M.contiguous(),
        rows.seed_high_M.contiguous(),
        rows.choice_index_M.contiguous(),
        position_M,
        position_M if is_sampled_M is None else is_sampled_M.contiguous(),
        position_M if noise_ids_V is None else noise_ids_V.contiguous(),
        best_MT,
        column_MT,
        num_columns,
        num_tiles,
        weights_MV.stride(0),
        **sample_constants(
            kind, has_flags=is_sampled_M is not None, has_ids=noise_ids_V is not None
        ),
        OVERLAP=is_overlapping,
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )
    launch_pick(best_MT, column_MT, out_M, names_V, copy_M)
    return out_M


def launch_pick(
    best_MT: torch.Tensor,
    column_MT: torch.Tensor,
    out_M: torch.Tensor,
    names_V: torch.Tensor | None,
    copy_M: torch.Tensor | None,
) -> None:
    """Launch the choice among the tiles of each row; see `sample` for names and the copy."""
    num_rows, num_tiles = best_MT.shape
    is_overlapping, options = overlap_options(best_MT.device, None)
    sample_pick_kernel[(num_rows,)](
        best_MT,
        column_MT,
        out_M if names_V is None else names_V.contiguous(),
        out_M,
        out_M if copy_M is None else copy_M,
        num_tiles,
        0 if copy_M is None else copy_M.stride(0),
        **pick_constants(is_named=names_V is not None, is_copied=copy_M is not None),
        OVERLAP=is_overlapping,
        num_warps=4,
        **options,
    )


def sample_constants(kind: int, *, has_flags: bool, has_ids: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of `sample_tile_kernel`."""
    return {
        "KIND": int(kind),
        "HAS_FLAGS": has_flags,
        "HAS_IDS": has_ids,
        "BLOCK": SAMPLE_BLOCK,
    }


def pick_constants(*, is_named: bool = False, is_copied: bool = False) -> dict[str, int | bool]:
    """Return the compile-time arguments of `sample_pick_kernel`."""
    return {"NAMED": is_named, "COPIED": is_copied, "BLOCK": PICK_BLOCK}
