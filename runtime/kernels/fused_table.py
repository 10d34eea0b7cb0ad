"""Pinned tiles of the products that read or write the residual stream on CUDA.

As in `runtime.kernels.gemm_table`: an entry follows the weight's shape, the element size and the
architecture, never the number of rows. These products sum K in one part and one accumulator, so
only BLOCK_K and the instruction could move a bit; BLOCK_M, BLOCK_N, warps, stages and the preload
decide who sums, not how (seen bit-equal on an H200; the GPU tests repeat it).

Legend: N output features, K input features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from runtime.kernels.stream import square_tile
from runtime.kernels.tile_rules import num_sms, rule_block_k, rule_stages

FusedOp = Literal["scaled", "gated", "residual"]

_RULE_VERSION = 1
_TABLED_ARCH = 90
_PRELOAD_BYTES = 400  # operands that a thread can hold in registers without spilling


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedConfig:
    """Tile of one fused product.

    Args:
        block_n: output features per program; whole square tiles when it writes a stream.
        block_k: input features per inner step.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline when the weights are not preloaded.
        preload: load the program's weights whole, before the predecessor's results are awaited,
            where the rows at hand leave registers for it.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    preload: bool = False


# sm_90, 2-byte elements, (op, N, K); printed by docs/benchmarks/tune_gemm.py.
_TABLE: dict[tuple[FusedOp, int, int], FusedConfig] = {
    # SmolLM2-135M: qkv, o, gate and up, down
    ("scaled", 960, 576): FusedConfig(
        block_n=16, block_k=64, num_warps=4, num_stages=4, preload=True
    ),
    ("residual", 576, 576): FusedConfig(block_n=16, block_k=64, num_warps=2, num_stages=7),
    ("gated", 3072, 576): FusedConfig(
        block_n=64, block_k=64, num_warps=8, num_stages=3, preload=True
    ),
    ("residual", 576, 1536): FusedConfig(block_n=16, block_k=256, num_warps=4, num_stages=5),
}


def fused_config(
    op: FusedOp, out_features: int, in_features: int, *, element_bytes: int, arch: int
) -> FusedConfig:
    """Return the pinned tile of a weight.

    Args:
        op: what the product is fused with.
        out_features: N.
        in_features: K.
        element_bytes: size of an element of the inputs, 2 or 4.
        arch: compute capability as major * 10 + minor.
    """
    if element_bytes == 2 and arch == _TABLED_ARCH:
        tuned = _TABLE.get((op, out_features, in_features))
        if tuned is not None:
            return tuned
    return _rule(op, out_features, in_features, element_bytes=element_bytes, arch=arch)


def preloads(config: FusedConfig, block_m: int, in_features: int, element_bytes: int) -> bool:
    """Whether a program of `block_m` rows holds its operands whole; bits do not depend on it."""
    held = (config.block_n + block_m) * in_features * element_bytes
    return (
        config.preload
        and in_features % config.block_k == 0
        and held <= config.num_warps * 32 * _PRELOAD_BYTES
    )


def fused_table_facts() -> list[object]:
    """Return everything here that fixes bits, for the digest of all tables."""
    return [
        sorted([*key, asdict(config)] for key, config in _TABLE.items()),
        _RULE_VERSION,
        _TABLED_ARCH,
    ]


def fused_shapes() -> tuple[tuple[FusedOp, int, int], ...]:
    """Return the (op, N, K) of every tuned entry."""
    return tuple(sorted(_TABLE))


def _rule(
    op: FusedOp, out_features: int, in_features: int, *, element_bytes: int, arch: int
) -> FusedConfig:
    least = square_tile(out_features) if op == "residual" else 16
    block_n = 64
    while block_n > least and -(-out_features // block_n) < num_sms(arch):
        block_n //= 2
    block_k = rule_block_k(in_features, element_bytes)
    return FusedConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=4,
        num_stages=rule_stages(block_n, block_k, element_bytes, arch),
    )
