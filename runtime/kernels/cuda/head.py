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
from runtime.kernels.cuda.products import LINE_ELEMENTS, PREFETCH_FEATURES, prefetch_lines
from runtime.kernels.gemm_table import GemmConfig, block_m_for, head_config

PICK_BLOCK = 1024
_NO_ID = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def head_tile_kernel(
    x_ptr,
    w_ptr,
    best_ptr,
    id_ptr,
    num_rows,
    num_columns,
    num_features,
    num_tiles,
    stride_xm,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Best (logit, lowest id) of one vocabulary tile for BLOCK_M rows, into [M, T]."""
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
    acc = gemm_tile(
        x_ptr, w_ptr, stride_xm, stride_wn, row_start, column_start, 0, num_features,
        num_rows, num_columns, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    rows = row_start + tl.arange(0, BLOCK_M)
    columns = column_start + tl.arange(0, BLOCK_N)
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


def launch_head_logits(x_MD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Launch `head_logits`."""
    config = _config(x_MD, weight_VD)
    return launch_linear(x_MD, weight_VD, out_dtype=torch.float32, config=config)


def launch_head_argmax(
    x_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    config: GemmConfig | None = None,
    overlap: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `head_argmax`; `config` replaces the pinned tile while one is searched for."""
    x_MD, weight_VD = inner_contiguous(x_MD), inner_contiguous(weight_VD)
    num_rows, num_features = x_MD.shape
    num_columns = weight_VD.shape[0]
    ids_M = torch.empty(num_rows, dtype=torch.int64, device=x_MD.device)
    logit_M = torch.empty(num_rows, dtype=torch.float32, device=x_MD.device)
    if num_rows == 0:
        return ids_M, logit_M
    config = config or _config(x_MD, weight_VD)
    block_m = block_m_for(num_rows)
    num_tiles = ceil_div(num_columns, config.block_n)
    is_overlapping, options = overlap_options(x_MD.device, overlap)
    best_MT = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x_MD.device)
    ids_MT = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x_MD.device)
    head_tile_kernel[(ceil_div(num_rows, block_m), num_tiles)](
        x_MD,
        weight_VD,
        best_MT,
        ids_MT,
        num_rows,
        num_columns,
        num_features,
        num_tiles,
        x_MD.stride(0),
        weight_VD.stride(0),
        **head_constants(config, block_m),
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
