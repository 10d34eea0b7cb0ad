"""The greedy choice among named head rows on CUDA: the head's product over gathered rows.

A program multiplies one input row by BLOCK_N gathered rows with the steps of `gemm_tile`, so the
logits are those of `head_logits`; `head_pick_kernel` then compares the programs of a row.

Legend: M rows, D width, V head rows, E named rows of each input row, T tiles of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div, device_arch, inner_contiguous
from runtime.kernels.cuda.head import head_constants, head_pick_kernel, pick_constants
from runtime.kernels.cuda.linear import gemm_steps
from runtime.kernels.cuda.normed_rows import launch_row_scales
from runtime.kernels.cuda.stream import launch_enter_stream
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, head_config
from runtime.kernels.norm import RowNorm

_NO_ID = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_named", "num_tiles"])
def head_rows_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    ids_ptr,
    best_ptr,
    id_ptr,
    num_features,
    num_named,
    num_tiles,
    stride_xm,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Best (logit, lowest id) of one tile of named rows for one input row, into [M, T]."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = tl.load(ids_ptr + row * num_named + places, mask=places < num_named, other=-1)
    is_named = ids >= 0
    lanes = tl.arange(0, BLOCK_M)
    acc = gemm_steps(
        (x_ptr + row * stride_xm + lanes * 0)[:, None],
        w_ptr + tl.where(is_named, ids, 0)[None, :] * stride_wn,
        (lanes < 1)[:, None],
        is_named[None, :],
        0,
        num_features,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if SCALED:
        acc = acc * tl.load(scale_ptr + row)
    is_candidate = (lanes < 1)[:, None] & is_named[None, :] & (acc == acc)
    acc = tl.where(is_candidate, acc, float("-inf"))
    best = tl.max(tl.max(acc, axis=1), axis=0)
    is_best = is_candidate & (acc == best)
    named = tl.where(is_named, ids, _NO_ID).to(tl.int32)
    chosen = tl.min(tl.min(tl.where(is_best, named[None, :], _NO_ID), axis=1), axis=0)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(id_ptr + row * num_tiles + tile, chosen)


def launch_head_rows_argmax(
    x_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    ids_ME: torch.Tensor,
    norm: RowNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `head_rows_argmax`."""
    x_MD, weight_VD = inner_contiguous(x_MD), inner_contiguous(weight_VD)
    ids_ME = ids_ME.contiguous()
    (num_rows, num_features), num_named = x_MD.shape, ids_ME.shape[1]
    ids_M = torch.zeros(num_rows, dtype=torch.int64, device=x_MD.device)
    logit_M = torch.full((num_rows,), float("-inf"), dtype=torch.float32, device=x_MD.device)
    if num_rows == 0 or num_named == 0:
        return ids_M, logit_M
    # Tiles of few rows: 32 columns fill the device sooner, and BLOCK_N moves no bit.
    config = head_config(
        min(num_named, 16_383),
        num_features,
        element_bytes=x_MD.element_size(),
        arch=device_arch(x_MD.device),
    )
    scale_M = None
    if norm is not None:
        entered = launch_enter_stream(x_MD, norm.weight_D)
        x_MD, scale_M = entered.weighted_MD, launch_row_scales(entered, norm.eps)
    num_tiles = ceil_div(num_named, config.block_n)
    best_MT = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x_MD.device)
    ids_MT = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x_MD.device)
    head_rows_kernel[(num_rows, num_tiles)](
        x_MD,
        weight_VD,
        weight_VD if scale_M is None else scale_M,
        ids_ME,
        best_MT,
        ids_MT,
        num_features,
        num_named,
        num_tiles,
        x_MD.stride(0),
        weight_VD.stride(0),
        **head_constants(config, BLOCK_M_CHOICES[0]),
        SCALED=scale_M is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    head_pick_kernel[(num_rows,)](
        best_MT, ids_MT, ids_M, ids_M, logit_M, ids_M, num_tiles, 0,
        **pick_constants(), OVERLAP=False, num_warps=4,
    )  # fmt: skip
    return ids_M, logit_M
