"""The greedy choice among named head rows on CUDA: the head's product over gathered rows.

A program multiplies one input row by BLOCK_N gathered rows with the steps of `gemm_tile`, so the
logits are those of `head_logits`; `head_pick_kernel` then compares the programs of a row, with
those of a head where there is one.

Legend: M rows, D width, V head rows, R rows of another head, S slots, E named rows of each slot,
C rows named besides, U tiles of named rows.
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
from runtime.kernels.cuda.head import (
    TileChoices,
    entered_stream,
    head_constants,
    launch_head_argmax,
    launch_pick,
)
from runtime.kernels.cuda.linear import gemm_steps
from runtime.kernels.cuda.stream import load_squares, scale_constants, stream_scale
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, GemmConfig, head_config
from runtime.kernels.head import HeadRows
from runtime.kernels.head_rows import NamedRows
from runtime.kernels.norm import RowNorm

_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _named_ids(
    ids_ptr, slots_ptr, more_ids_ptr, row, places, num_own, num_named, SLOTTED: tl.constexpr
):
    """Load the ids that a row names in some places: those of its slot, then those besides."""
    source = tl.load(slots_ptr + row) if SLOTTED else row
    is_own = places < num_own
    own = tl.load(ids_ptr + source * num_own + places, mask=is_own, other=-1)
    more_ids = more_ids_ptr + row * (num_named - num_own) + (places - num_own)
    more = tl.load(more_ids, mask=(places >= num_own) & (places < num_named), other=-1)
    return tl.where(is_own, own, more)


@triton.jit(do_not_specialize=["num_own", "num_named", "num_tiles"])
def head_rows_kernel(
    x_ptr, w_ptr, squares_ptr, ids_ptr, slots_ptr, more_ids_ptr, best_ptr, id_ptr,
    eps, num_own, num_named, num_tiles, stride_xm, stride_wn,
    FEATURES: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLOTTED: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (logit, lowest id) of one tile of named rows for one input row, into [M, U].

    SCALED rows are those of a stream, weighed; their scales come from its squares.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_M)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    ids = _named_ids(ids_ptr, slots_ptr, more_ids_ptr, row, places, num_own, num_named, SLOTTED)
    is_named = ids >= 0
    acc = gemm_steps(
        (x_ptr + row * stride_xm + lanes * 0)[:, None],
        w_ptr + tl.where(is_named, ids, 0)[None, :] * stride_wn,
        (lanes < 1)[:, None],
        is_named[None, :],
        0,
        FEATURES,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if SCALED:
        squares = load_squares(squares_ptr, row + lanes * 0, lanes < 1, TILES, BLOCK_T)
        acc = acc * stream_scale(squares, eps, FEATURES, BLOCK_M, BLOCK_T)[:, None]
    is_candidate = (lanes < 1)[:, None] & is_named[None, :] & (acc == acc)
    acc = tl.where(is_candidate, acc, float("-inf"))
    best = tl.max(tl.max(acc, axis=1), axis=0)
    is_best = is_candidate & (acc == best)
    named = tl.where(is_named, ids, _NO_ID).to(tl.int32)
    chosen = tl.min(tl.min(tl.where(is_best, named[None, :], _NO_ID), axis=1), axis=0)
    tl.store(best_ptr + row * num_tiles + tile, best)
    tl.store(id_ptr + row * num_tiles + tile, chosen)


def launch_head_rows_argmax(
    x_MD: HeadRows, named: NamedRows, norm: RowNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `head_rows_argmax`."""
    if norm is not None:
        x_MD = entered_stream(x_MD, norm, None)
    return launch_pick(_choose_in_tiles(x_MD, named, norm), names_V=None, copy_M=None)


def launch_joint_head_argmax(
    x_MD: HeadRows,
    weight_RD: torch.Tensor,
    named: NamedRows,
    norm: RowNorm | None = None,
    *,
    names_R: torch.Tensor,
    copy_M: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `joint_head_argmax`: both products, and one comparison of all their tiles."""
    if norm is not None:
        x_MD = entered_stream(x_MD, norm, None)
    rivals = _choose_in_tiles(x_MD, named, norm) if named.num_named else None
    return launch_head_argmax(x_MD, weight_RD, norm, names_V=names_R, copy_M=copy_M, rivals=rivals)


def _choose_in_tiles(x_MD: HeadRows, named: NamedRows, norm: RowNorm | None) -> TileChoices:
    """Return the best of each tile of named rows; of a tile that names nothing minus infinity."""
    squares_MT = None
    if not isinstance(x_MD, torch.Tensor):
        assert norm is not None, "a stream needs the norm that it stands at"
        squares_MT, x_MD = x_MD.squares_MT, x_MD.weighted_MD
    x_MD, weight_VD = inner_contiguous(x_MD), inner_contiguous(named.weight_VD)
    num_rows, num_features = x_MD.shape
    config = _config(named.num_named, x_MD)
    choices = TileChoices.empty(num_rows, ceil_div(named.num_named, config.block_n), x_MD.device)
    if choices.best_MT.numel() == 0:
        return choices
    ids_SE, more = named.ids_SE.contiguous(), named.more_ids_MC
    overlapped, options = overlap_options(x_MD.device, None)
    head_rows_kernel[choices.best_MT.shape](
        x_MD,
        weight_VD,
        weight_VD if squares_MT is None else squares_MT,
        ids_SE,
        ids_SE if named.slots_M is None else named.slots_M.contiguous(),
        ids_SE if more is None else more.contiguous(),
        choices.best_MT,
        choices.ids_MT,
        0.0 if norm is None else norm.eps,
        ids_SE.shape[1],
        named.num_named,
        choices.best_MT.shape[1],
        x_MD.stride(0),
        weight_VD.stride(0),
        **head_rows_constants(config, num_features),
        SLOTTED=named.slots_M is not None,
        SCALED=squares_MT is not None,
        OVERLAP=overlapped,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    return choices


def head_rows_constants(config: GemmConfig, num_features: int) -> dict[str, int]:
    """Return the compile-time arguments of `head_rows_kernel` that follow tile and width."""
    tile = head_constants(config, BLOCK_M_CHOICES[0])
    return {"FEATURES": num_features, **scale_constants(num_features), **tile}


def _config(num_named: int, x_MD: torch.Tensor) -> GemmConfig:
    # Tiles of few rows: 32 columns fill the device sooner, and BLOCK_N moves no bit.
    return head_config(
        min(num_named, 16_383),
        x_MD.shape[1],
        element_bytes=x_MD.element_size(),
        arch=device_arch(x_MD.device),
    )
