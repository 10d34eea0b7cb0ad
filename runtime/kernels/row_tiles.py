"""How many rows run the pinned tile of a product of the residual stream on CUDA.

The pinned tile (`fused_table`) says how a row is summed; a row tile says which rows and features
share a program and how its warps split the work. It moves no bit (the GPU tests repeat it), so it
may follow the number of rows. Chosen by docs/benchmarks/tune_rows.py.

Legend: M rows, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.kernels.fused_table import (
    STAGE_BYTES,
    FusedConfig,
    FusedOp,
    fitting_stages,
    is_small_weight,
    preloads,
)
from runtime.kernels.tile_rules import BLOCK_M_CHOICES, Overlap, block_m_for

_LEAST_PROGRAMS = 96  # fewer leave too many multiprocessors idle
_FEW_ROWS = BLOCK_M_CHOICES[-1]
_SOME_ROWS = 224  # verifies of 32 requests; beyond, small weights run on wider tiles
_MANY_ROWS = 512
# Rows and output features of a program that sums the parts of K in turn, widest first.
_SIZES = ((128, 128), (64, 128), (64, 64))
_RESIDUAL_SIZES = ((128, 64), (64, 64), (64, 32))  # the stream and its squares take registers


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTile:
    """How a launch of some rows runs a pinned tile; nothing here moves a bit.

    Args:
        block_m: rows per program.
        block_n: output features per program; whole square tiles when it writes a stream.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
        preload: hold the program's operands whole in registers.
        in_turn: sum the parts of K one after the other, with all warps.
        overlap: as in `FusedConfig`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    preload: bool = False
    in_turn: bool = False
    overlap: Overlap = "never"


# 2-byte elements, (op, N, K): the most rows, rows and features of a program, warps.
_TABLE: dict[tuple[FusedOp, int, int], tuple[tuple[int, int, int, int], ...]] = {
    # SmolLM2-135M: qkv, o, gate and up, down
    ("scaled", 960, 576): ((64, 16, 16, 4), (_SOME_ROWS, 16, 64, 4), (_MANY_ROWS, 64, 32, 8)),
    ("residual", 576, 576): ((64, 16, 32, 8), (_SOME_ROWS, 16, 16, 4), (_MANY_ROWS, 64, 32, 8)),
    ("gated", 3072, 576): ((64, 16, 32, 8), (_SOME_ROWS, 32, 64, 4)),
    ("residual", 576, 1536): ((64, 16, 16, 8), (_SOME_ROWS, 32, 32, 8), (_MANY_ROWS, 64, 32, 8)),
    # Llama-3.2-1B: o, down
    ("residual", 2048, 2048): ((32, 32, 16, 4), (64, 32, 32, 4)),
    ("residual", 2048, 8192): ((32, 32, 16, 4), (64, 32, 32, 4)),
}


def row_tile(
    op: FusedOp,
    config: FusedConfig,
    out_features: int,
    in_features: int,
    num_rows: int,
    *,
    element_bytes: int,
) -> RowTile:
    """Return how `num_rows` rows run a pinned tile.

    Args:
        op: what the product is fused with.
        config: of the weight.
        out_features: N.
        in_features: K.
        num_rows: M.
        element_bytes: size of an element of the inputs, 2 or 4.
    """
    if num_rows > BLOCK_M_CHOICES[0] and element_bytes == 2:
        for most, block_m, block_n, num_warps in _TABLE.get((op, out_features, in_features), ()):
            if num_rows <= most:
                sized = replace(config, block_n=block_n, num_warps=num_warps)
                return _at_once(sized, block_m, in_features, element_bytes)
    is_small = is_small_weight(out_features, in_features)
    # A qkv of few rows lets attention begin early, which is worth more than a better tile.
    few = _SOME_ROWS if is_small else _FEW_ROWS if op == "scaled" else BLOCK_M_CHOICES[1]
    if num_rows > few:
        found = _in_turn(op, config, out_features, num_rows, element_bytes)
        if found is not None:
            return found
    block_m = block_m_for(num_rows)
    if is_small and num_rows <= _SOME_ROWS:
        block_m = BLOCK_M_CHOICES[0 if num_rows <= _FEW_ROWS else 1]
    return _at_once(config, block_m, in_features, element_bytes)


def _at_once(config: FusedConfig, block_m: int, in_features: int, element_bytes: int) -> RowTile:
    """Return a tile whose warps run along the parts of K."""
    return RowTile(
        block_m=block_m,
        block_n=config.block_n,
        num_warps=config.num_warps,
        num_stages=fitting_stages(config, block_m, element_bytes),
        preload=preloads(config, block_m, in_features, element_bytes),
        overlap=config.overlap,
    )


def _in_turn(
    op: FusedOp, config: FusedConfig, out_features: int, num_rows: int, element_bytes: int
) -> RowTile | None:
    """Return the widest tile that leaves enough programs, or None."""
    for block_m, block_n in _RESIDUAL_SIZES if op == "residual" else _SIZES:
        programs = -(-num_rows // block_m) * -(-out_features // block_n)
        fits = block_n % config.block_n == 0 and (block_m <= _FEW_ROWS or num_rows > _FEW_ROWS)
        if fits and programs >= _LEAST_PROGRAMS:
            step_bytes = (block_m + block_n) * config.block_k * element_bytes
            return RowTile(
                block_m=block_m,
                block_n=block_n,
                num_warps=4 if block_m * block_n <= 64 * 64 else 8,
                num_stages=max(1, min(4, STAGE_BYTES // step_bytes)),
                in_turn=True,
            )
    return None
