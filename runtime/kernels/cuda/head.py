"""Head logits and the fused greedy choice on CUDA.

The fused pass sums each logit over K in the steps of `launch_head_logits`, keeps the best
(logit, lowest id) of a vocabulary tile, and a second kernel picks among the tiles. Comparing
(logit, lowest id) is exact in any order, so only the logits' sums need pinning.

Legend: M rows, D width, V head rows, T vocabulary tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import (
    ceil_div,
    device_arch,
    inner_contiguous,
    overlap_options,
    power_of_two,
)
from runtime.kernels.cuda.linear import launch_linear
from runtime.kernels.cuda.normed_rows import launch_row_scales
from runtime.kernels.cuda.products import sum_products
from runtime.kernels.cuda.stream import (
    launch_enter_stream,
    load_squares,
    scale_constants,
    stream_scale,
)
from runtime.kernels.gemm_table import GemmConfig, block_m_for, head_config
from runtime.kernels.head import HeadRows
from runtime.kernels.norm import RowNorm
from runtime.kernels.stream import Stream
from runtime.kernels.tile_rules import Overlap

PICK_BLOCK = 1024
_RIVAL_BLOCK = 32
_ARGMAX_BLOCK = 8192
_TILE_OVERLAP: Overlap = "started"
_NO_ID = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def head_tile_kernel(
    x_ptr, w_ptr, squares_ptr, best_ptr, id_ptr, eps, num_rows, num_columns, num_tiles,
    stride_xm, stride_wn,
    FEATURES: tl.constexpr, PART_FEATURES: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (logit, lowest id) of one vocabulary tile for BLOCK_M rows, into [M, T].

    SCALED rows are those of a stream, weighed; their scales come from its squares.
    """
    tile = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    is_column = columns < num_columns
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if SCALED:
        squares = load_squares(squares_ptr, rows, is_row, TILES, BLOCK_T)
    acc = sum_products(
        x_ptr + rows.to(tl.int64)[:, None] * stride_xm,
        w_ptr + columns.to(tl.int64)[None, :] * stride_wn,
        (), is_row[:, None], is_column[None, :],
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, 1, PART_FEATURES, STAGES, False, False,
    )  # fmt: skip
    if SCALED:
        acc = acc * stream_scale(squares, eps, FEATURES, BLOCK_M, BLOCK_T)[:, None]
    acc = tl.where(is_column[None, :] & (acc == acc), acc, float("-inf"))
    best = tl.max(acc, axis=1)
    ids = tl.min(tl.where(acc == best[:, None], columns[None, :], _NO_ID), axis=1)
    out = rows.to(tl.int64) * num_tiles + tile
    tl.store(best_ptr + out, best, mask=is_row)
    tl.store(id_ptr + out, ids, mask=is_row)


@triton.jit
def _best_tile(best_ptr, id_ptr, row, num_tiles, BLOCK: tl.constexpr):
    """Return the best (logit, lowest id) over the tiles of one row."""
    lanes = tl.arange(0, BLOCK)
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
    return row_best, tl.min(tl.where(best == row_best, ids, _NO_ID), axis=0).to(tl.int64)


@triton.jit(
    do_not_specialize=["num_tiles", "num_rivals", "stride_copy"],
    do_not_specialize_on_alignment=["copy_ptr"],
)
def head_pick_kernel(
    best_ptr, id_ptr, rival_best_ptr, rival_id_ptr, names_ptr, out_id_ptr, out_logit_ptr, copy_ptr,
    num_tiles, num_rivals, stride_copy,
    NAMED: tl.constexpr, COPIED: tl.constexpr, RIVALLED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_RIVALS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (logit, lowest id) over the tiles of one row; the id goes by its name, if it has one.

    RIVALLED it meets the tiles of rows that already have names; minus infinity beats nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_best, row_id = _best_tile(best_ptr, id_ptr, row, num_tiles, BLOCK)
    if NAMED:
        row_id = tl.load(names_ptr + row_id)
    if RIVALLED:
        rival, rival_id = _best_tile(rival_best_ptr, rival_id_ptr, row, num_rivals, BLOCK_RIVALS)
        is_better = (rival > row_best) | ((rival == row_best) & (rival_id < row_id))
        is_better = is_better & (rival > float("-inf"))
        row_best = tl.where(is_better, rival, row_best)
        row_id = tl.where(is_better, rival_id, row_id)
    tl.store(out_id_ptr + row, row_id)
    tl.store(out_logit_ptr + row, row_best)
    if COPIED:
        tl.store(copy_ptr + row * stride_copy, row_id)


@triton.jit(
    do_not_specialize=["num_columns", "stride_logits", "stride_copy"],
    do_not_specialize_on_alignment=["copy_ptr"],
)
def logits_argmax_kernel(
    logits_ptr, names_ptr, out_id_ptr, copy_ptr, num_columns, stride_logits, stride_copy,
    NAMED: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Best (logit, lowest id) of one row of finished logits, by its name if it has one."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    ids = lanes
    for start in range(0, num_columns, BLOCK):
        columns = start + lanes
        mask = columns < num_columns
        logit = tl.load(logits_ptr + row * stride_logits + columns, mask=mask, other=float("-inf"))
        is_better = logit > best  # ids ascend in a lane; a NaN is not better
        best = tl.where(is_better, logit, best)
        ids = tl.where(is_better, columns, ids)
    row_best = tl.max(best, axis=0)
    row_id = tl.min(tl.where(best == row_best, ids, _NO_ID), axis=0).to(tl.int64)
    if NAMED:
        row_id = tl.load(names_ptr + row_id)
    tl.store(out_id_ptr + row, row_id)
    if COPIED:
        tl.store(copy_ptr + row * stride_copy, row_id)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileChoices:
    """What tiles of a head chose for each row.

    Args:
        best_MT: float32, the highest logit of a tile; minus infinity where it has none.
        ids_MT: int32, the lowest id with that logit.
    """

    best_MT: torch.Tensor
    ids_MT: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, num_tiles: int, device: torch.device) -> TileChoices:
        """Allocate the choices of so many rows and tiles."""
        shape = (num_rows, num_tiles)
        return cls(
            best_MT=torch.empty(shape, dtype=torch.float32, device=device),
            ids_MT=torch.empty(shape, dtype=torch.int32, device=device),
        )


def launch_head_logits(
    x_MD: HeadRows, weight_VD: torch.Tensor, norm: RowNorm | None = None
) -> torch.Tensor:
    """Launch `head_logits`."""
    scale_M = None
    if norm is not None:
        entered = entered_stream(x_MD, norm, None)
        x_MD, scale_M = entered.weighted_MD, launch_row_scales(entered, norm.eps)
    assert isinstance(x_MD, torch.Tensor), "a stream needs the norm that it stands at"
    config = _config(x_MD, weight_VD)
    return launch_linear(x_MD, weight_VD, out_dtype=torch.float32, scale_M=scale_M, config=config)


def launch_head_argmax(
    x_MD: HeadRows,
    weight_VD: torch.Tensor,
    norm: RowNorm | None = None,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
    config: GemmConfig | None = None,
    overlap: bool | None = None,
    rivals: TileChoices | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `head_argmax`; `config` replaces the pinned tile while one is searched for.

    A norm is taken in ahead of the tiles: rows are weighed once, and tiles scale their sums. What
    wrote a stream has done so already. Rivals are of rows beside the head's, by their names.
    """
    squares_MT = None
    if norm is not None:
        entered = entered_stream(x_MD, norm, overlap)
        x_MD, squares_MT = entered.weighted_MD, entered.squares_MT
    assert isinstance(x_MD, torch.Tensor), "a stream needs the norm that it stands at"
    x_MD, weight_VD = inner_contiguous(x_MD), inner_contiguous(weight_VD)
    num_rows, num_features = x_MD.shape
    num_columns = weight_VD.shape[0]
    config = config or _config(x_MD, weight_VD)
    block_m = block_m_for(num_rows)
    num_tiles = ceil_div(num_columns, config.block_n)
    choices = TileChoices.empty(num_rows, num_tiles, x_MD.device)
    if num_rows == 0:
        return launch_pick(choices, names_V, copy_M)
    overlapped, options = overlap_options(x_MD.device, overlap, _TILE_OVERLAP)
    head_tile_kernel[(ceil_div(num_rows, block_m), num_tiles)](
        x_MD,
        weight_VD,
        weight_VD if squares_MT is None else squares_MT,
        choices.best_MT,
        choices.ids_MT,
        0.0 if norm is None else norm.eps,
        num_rows,
        num_columns,
        num_tiles,
        x_MD.stride(0),
        weight_VD.stride(0),
        **head_constants(config, block_m),
        **head_features(config, num_features),
        **scale_constants(num_features),
        STAGES=config.num_stages,
        SCALED=norm is not None,
        OVERLAP=overlapped,
        num_warps=config.num_warps,
        **options,
    )
    return launch_pick(choices, names_V, copy_M, overlap=overlap, rivals=rivals)


def launch_pick(
    choices: TileChoices,
    names_V: torch.Tensor | None,
    copy_M: torch.Tensor | None,
    *,
    overlap: bool | None = None,
    rivals: TileChoices | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int64 [M], logit float32 [M]): the best of each row's tiles.

    Args:
        choices: of the head's tiles.
        names_V: as in `head_argmax`.
        copy_M: as in `head_argmax`.
        overlap: replaces the architecture's choice.
        rivals: of tiles of other rows, by their names.
    """
    (num_rows, num_tiles), device = choices.best_MT.shape, choices.best_MT.device
    ids_M = torch.empty(num_rows, dtype=torch.int64, device=device)
    logit_M = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return ids_M, logit_M
    others = choices if rivals is None else rivals
    overlapped, options = overlap_options(device, overlap)
    head_pick_kernel[(num_rows,)](
        choices.best_MT,
        choices.ids_MT,
        others.best_MT,
        others.ids_MT,
        ids_M if names_V is None else names_V.contiguous(),
        ids_M,
        logit_M,
        ids_M if copy_M is None else copy_M,
        num_tiles,
        others.best_MT.shape[1],
        0 if copy_M is None else copy_M.stride(0),
        **pick_constants(
            is_named=names_V is not None,
            is_copied=copy_M is not None,
            has_rivals=rivals is not None,
        ),
        OVERLAP=overlapped,
        num_warps=4,
        **options,
    )
    return ids_M, logit_M


def launch_logits_argmax(
    logits_MV: torch.Tensor, names_V: torch.Tensor | None, copy_M: torch.Tensor | None
) -> torch.Tensor:
    """Launch `logits_argmax`."""
    logits_MV = inner_contiguous(logits_MV)
    num_rows, num_columns = logits_MV.shape
    ids_M = torch.empty(num_rows, dtype=torch.int64, device=logits_MV.device)
    if num_rows == 0:
        return ids_M
    overlapped, options = overlap_options(logits_MV.device, None)
    logits_argmax_kernel[(num_rows,)](
        logits_MV,
        ids_M if names_V is None else names_V.contiguous(),
        ids_M,
        ids_M if copy_M is None else copy_M,
        num_columns,
        logits_MV.stride(0),
        0 if copy_M is None else copy_M.stride(0),
        **argmax_constants(num_columns, is_named=names_V is not None, is_copied=copy_M is not None),
        OVERLAP=overlapped,
        num_warps=8,
        **options,
    )
    return ids_M


def argmax_constants(num_columns: int, *, is_named: bool, is_copied: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of `logits_argmax_kernel`."""
    block = min(_ARGMAX_BLOCK, power_of_two(num_columns))
    return {"NAMED": is_named, "COPIED": is_copied, "BLOCK": block}


def entered_stream(x_MD: HeadRows, norm: RowNorm, overlap: bool | None) -> Stream:
    """Return the rows as a stream at the norm."""
    if isinstance(x_MD, Stream):
        return x_MD
    return launch_enter_stream(x_MD, norm.weight_D, overlap=overlap)


def pick_constants(
    *, is_named: bool = False, is_copied: bool = False, has_rivals: bool = False
) -> dict[str, int | bool]:
    """Return the compile-time arguments of `head_pick_kernel`."""
    return {
        "NAMED": is_named,
        "COPIED": is_copied,
        "RIVALLED": has_rivals,
        "BLOCK": PICK_BLOCK,
        "BLOCK_RIVALS": _RIVAL_BLOCK,
    }


def head_constants(config: GemmConfig, block_m: int) -> dict[str, int]:
    """Return the compile-time arguments of `head_tile_kernel`."""
    assert config.split_k == 1, "the fused choice sums K in one part"
    return {"BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}


def head_features(config: GemmConfig, num_features: int) -> dict[str, int]:
    """Return the compile-time arguments of `head_tile_kernel` that follow D."""
    whole_steps = ceil_div(num_features, config.block_k) * config.block_k
    return {"FEATURES": num_features, "PART_FEATURES": whole_steps}


def _config(x_MD: torch.Tensor, weight_VD: torch.Tensor) -> GemmConfig:
    num_columns, num_features = weight_VD.shape
    return head_config(
        num_columns,
        num_features,
        element_bytes=x_MD.element_size(),
        arch=device_arch(x_MD.device),
    )
