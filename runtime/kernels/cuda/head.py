"""Head logits and the fused greedy choice on CUDA.

The fused pass forms each logit with `gemm_tile` under the tile of `launch_head_logits`, keeps the
best (logit, lowest id) of a vocabulary tile, and a second kernel picks among the tiles. Comparing
(logit, lowest id) is exact in any order, so only the logits' sums need pinning.

Legend: M rows, D width, V head rows, T vocabulary tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import (
    ceil_div,
    device_arch,
    inner_contiguous,
    overlap_options,
)
from runtime.kernels.cuda.linear import gemm_tile, launch_linear
from runtime.kernels.cuda.normed_rows import launch_weigh_rows, row_scale, sum_normed_rows
from runtime.kernels.cuda.products import LINE_ELEMENTS, PREFETCH_FEATURES, prefetch_lines
from runtime.kernels.gemm_table import GemmConfig, block_m_for, head_config
from runtime.kernels.norm import RowNorm

PICK_BLOCK = 1024
HEAD_NORM_ROWS = 16
"""Most rows that the tiles of a choice norm themselves; bits do not depend on it."""

_NO_ID = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def head_tile_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    scale_ptr,
    best_ptr,
    id_ptr,
    eps,
    mean_factor,
    num_rows,
    num_columns,
    num_features,
    num_tiles,
    stride_xm,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORMED: tl.constexpr,
    SCALED: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best (logit, lowest id) of one vocabulary tile for BLOCK_M rows, into [M, T].

    NORMED rows are weighed here, SCALED ones come weighed with their scales.
    """
    row_start = tl.program_id(0) * BLOCK_M
    tile = tl.program_id(1)
    column_start = tile * BLOCK_N
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            columns = column_start + tl.arange(0, BLOCK_N)
            w_rows = w_ptr + tl.minimum(columns, num_columns - 1).to(tl.int64)[None, :] * stride_wn
            for k in range(0, PREFETCH, BLOCK_K):
                lines = k + tl.arange(0, BLOCK_K // LINE_ELEMENTS) * LINE_ELEMENTS
                prefetch_lines(w_rows + lines[:, None])
        tl.extra.cuda.gdc_wait()
    rows = row_start + tl.arange(0, BLOCK_M)
    columns = column_start + tl.arange(0, BLOCK_N)
    if NORMED:
        acc, squares = sum_normed_rows(
            x_ptr + rows.to(tl.int64)[:, None] * stride_xm, norm_ptr,
            w_ptr + columns.to(tl.int64)[None, :] * stride_wn,
            (rows < num_rows)[:, None], (columns < num_columns)[None, :],
            num_features, STAGES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = acc * row_scale(squares, eps, mean_factor, BLOCK_M, BLOCK_K)[:, None]
    else:
        acc = gemm_tile(
            x_ptr, w_ptr, stride_xm, stride_wn, row_start, column_start, 0, num_features,
            num_rows, num_columns, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if SCALED:
        acc = acc * tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    is_candidate = (columns < num_columns)[None, :] & (acc == acc)
    acc = tl.where(is_candidate, acc, float("-inf"))
    best = tl.max(acc, axis=1)
    ids = tl.min(tl.where(acc == best[:, None], columns[None, :], _NO_ID), axis=1)
    out = rows.to(tl.int64) * num_tiles + tile
    tl.store(best_ptr + out, best, mask=rows < num_rows)
    tl.store(id_ptr + out, ids, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_tiles"])
def head_pick_kernel(
    best_ptr,
    id_ptr,
    out_id_ptr,
    out_logit_ptr,
    num_tiles,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best (logit, lowest id) over the tiles of one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    ids = tl.full((BLOCK,), _NO_ID, dtype=tl.int32)
    for start in range(0, num_tiles, BLOCK):
        tiles = start + lanes
        mask = tiles < num_tiles
        logit = tl.load(best_ptr + row * num_tiles + tiles, mask=mask, other=float("-inf"))
        candidate = tl.load(id_ptr + row * num_tiles + tiles, mask=mask, other=_NO_ID)
        is_better = (logit > best) | ((logit == best) & (candidate < ids))
        best = tl.where(is_better, logit, best)
        ids = tl.where(is_better, candidate, ids)
    row_best = tl.max(best, axis=0)
    row_id = tl.min(tl.where(best == row_best, ids, _NO_ID), axis=0)
    tl.store(out_id_ptr + row, row_id.to(tl.int64))
    tl.store(out_logit_ptr + row, row_best)


def launch_head_logits(
    x_MD: torch.Tensor, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> torch.Tensor:
    """Launch `head_logits`."""
    config, scale_M = _config(x_MD, weight_VD), None
    if norm is not None:
        x_MD, scale_M = launch_weigh_rows(x_MD, norm, block_k=config.block_k)
    return launch_linear(x_MD, weight_VD, out_dtype=torch.float32, scale_M=scale_M, config=config)


def launch_head_argmax(
    x_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    norm: RowNorm | None = None,
    *,
    config: GemmConfig | None = None,
    overlap: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `head_argmax`; `config` replaces the pinned tile while one is searched for.

    The tiles of few rows norm them themselves; for more rows that is done once, ahead of them.
    """
    x_MD, weight_VD = inner_contiguous(x_MD), inner_contiguous(weight_VD)
    num_rows, num_features = x_MD.shape
    num_columns = weight_VD.shape[0]
    ids_M = torch.empty(num_rows, dtype=torch.int64, device=x_MD.device)
    logit_M = torch.empty(num_rows, dtype=torch.float32, device=x_MD.device)
    if num_rows == 0:
        return ids_M, logit_M
    config = config or _config(x_MD, weight_VD)
    block_m = block_m_for(num_rows)
    is_normed = norm is not None and num_rows <= HEAD_NORM_ROWS
    scale_M = None
    if norm is not None and not is_normed:
        x_MD, scale_M = launch_weigh_rows(x_MD, norm, block_k=config.block_k, overlap=overlap)
    num_tiles = ceil_div(num_columns, config.block_n)
    is_overlapping, options = overlap_options(x_MD.device, overlap)
    best_MT = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x_MD.device)
    ids_MT = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x_MD.device)
    head_tile_kernel[(ceil_div(num_rows, block_m), num_tiles)](
        x_MD,
        weight_VD,
        weight_VD if norm is None else norm.weight_D,
        weight_VD if scale_M is None else scale_M,
        best_MT,
        ids_MT,
        0.0 if norm is None else norm.eps,
        1.0 / num_features,
        num_rows,
        num_columns,
        num_features,
        num_tiles,
        x_MD.stride(0),
        weight_VD.stride(0),
        **head_constants(config, block_m),
        STAGES=config.num_stages,
        NORMED=is_normed,
        SCALED=scale_M is not None,
        **overlap_constants(config, num_features, x_MD.element_size(), is_overlapping),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    head_pick_kernel[(num_rows,)](
        best_MT, ids_MT, ids_M, logit_M, num_tiles, BLOCK=PICK_BLOCK, OVERLAP=is_overlapping,
        num_warps=4, **options,
    )  # fmt: skip
    return ids_M, logit_M


def head_constants(config: GemmConfig, block_m: int) -> dict[str, int]:
    """Return the compile-time arguments of `head_tile_kernel`."""
    assert config.split_k == 1, "the fused choice sums K in one part"
    return {"BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}


def overlap_constants(
    config: GemmConfig, num_features: int, element_bytes: int, is_overlapping: bool
) -> dict[str, int | bool]:
    """Return the compile-time arguments by which `head_tile_kernel` overlaps its predecessor."""
    can_prefetch = is_overlapping and element_bytes == 2 and config.block_k >= 64
    features = min(num_features, PREFETCH_FEATURES) // config.block_k * config.block_k
    return {"PREFETCH": features if can_prefetch else 0, "OVERLAP": is_overlapping}


def _config(x_MD: torch.Tensor, weight_VD: torch.Tensor) -> GemmConfig:
    num_columns, num_features = weight_VD.shape
    return head_config(
        num_columns,
        num_features,
        element_bytes=x_MD.element_size(),
        arch=device_arch(x_MD.device),
    )
