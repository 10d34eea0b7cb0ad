"""The greedy choice from corrected logits on CUDA: the correction is never written.

A program makes the correction of a vocabulary tile by the sums of `head_tile_kernel`, adds it to
the logits and keeps the best; the kernel that picks among tiles is the head's.

Legend: M rows, D rank of the correction, X rows of a table, V ids of the head, T vocabulary tiles.
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
from runtime.kernels.cuda.head import TileChoices, head_constants, head_features, launch_pick
from runtime.kernels.cuda.products import sum_products
from runtime.kernels.gemm_table import GemmConfig, block_m_for, head_config
from runtime.kernels.tile_rules import Overlap

_TILE_OVERLAP: Overlap = "started"
_NO_ID = tl.constexpr(2147483647)


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "stride_logits"],
    do_not_specialize_on_alignment=["logits_ptr"],
)
def corrected_tile_kernel(
    logits_ptr, ids_ptr, x_ptr, w_ptr, best_ptr, id_ptr, num_rows, num_columns, num_tiles,
    stride_logits, stride_xm, stride_wn,
    GATHER: tl.constexpr, FEATURES: tl.constexpr, PART_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (corrected logit, lowest id) of one vocabulary tile for BLOCK_M rows, into [M, T]."""
    tile = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = columns < num_columns
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mask = is_row[:, None] & is_column[None, :]
    own = logits_ptr + rows.to(tl.int64)[:, None] * stride_logits + columns[None, :]
    logits = tl.load(own, mask=mask, other=0.0)
    source = tl.load(ids_ptr + rows, mask=is_row, other=0) if GATHER else rows.to(tl.int64)
    acc = sum_products(
        x_ptr + source[:, None] * stride_xm,
        w_ptr + columns.to(tl.int64)[None, :] * stride_wn,
        (), is_row[:, None], is_column[None, :],
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, 1, PART_FEATURES, STAGES, False, False,
    )  # fmt: skip
    # A sum with a product's result alone would become what the product starts from.
    acc = logits + tl.where(mask, acc, 0.0)
    acc = tl.where(is_column[None, :] & (acc == acc), acc, float("-inf"))
    best = tl.max(acc, axis=1)
    ids = tl.min(tl.where(acc == best[:, None], columns[None, :], _NO_ID), axis=1)
    out = rows.to(tl.int64) * num_tiles + tile
    tl.store(best_ptr + out, best, mask=is_row)
    tl.store(id_ptr + out, ids, mask=is_row)


def launch_corrected_argmax(
    logits_MV: torch.Tensor,
    rows_XD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    ids_M: torch.Tensor | None = None,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `corrected_argmax`."""
    logits_MV = inner_contiguous(logits_MV)
    rows_XD, weight_VD = inner_contiguous(rows_XD), inner_contiguous(weight_VD)
    (num_rows, num_columns), device = logits_MV.shape, logits_MV.device
    assert weight_VD.shape == (num_columns, rows_XD.shape[1]), "weight and rows disagree"
    config = _config(rows_XD, weight_VD)
    block_m = block_m_for(num_rows)
    num_tiles = ceil_div(num_columns, config.block_n)
    choices = TileChoices.empty(num_rows, num_tiles, device)
    if num_rows == 0:
        return launch_pick(choices, names_V, copy_M)
    overlapped, options = overlap_options(device, None, _TILE_OVERLAP)
    corrected_tile_kernel[(ceil_div(num_rows, block_m), num_tiles)](
        logits_MV,
        choices.ids_MT if ids_M is None else ids_M.contiguous(),
        rows_XD,
        weight_VD,
        choices.best_MT,
        choices.ids_MT,
        num_rows,
        num_columns,
        num_tiles,
        logits_MV.stride(0),
        rows_XD.stride(0),
        weight_VD.stride(0),
        **corrected_constants(config, block_m, rows_XD.shape[1], is_gathered=ids_M is not None),
        OVERLAP=overlapped,
        num_warps=config.num_warps,
        **options,
    )
    return launch_pick(choices, names_V, copy_M)


def corrected_constants(
    config: GemmConfig, block_m: int, num_features: int, *, is_gathered: bool
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `corrected_tile_kernel`."""
    return {
        "GATHER": is_gathered,
        **head_features(config, num_features),
        **head_constants(config, block_m),
        "STAGES": config.num_stages,
    }


def _config(rows_XD: torch.Tensor, weight_VD: torch.Tensor) -> GemmConfig:
    num_columns, num_features = weight_VD.shape
    return head_config(
        num_columns,
        num_features,
        element_bytes=rows_XD.element_size(),
        arch=device_arch(rows_XD.device),
    )
