"""Pinned tiles of the products that read or write the residual stream on CUDA.

As in `runtime.kernels.gemm_table`: an entry follows the weight's shape, the element size and the
architecture, never the number of rows. A product sums K in one accumulator, or in one for each of
its parts, which are then added in a fixed tree; the parts, BLOCK_K and the instruction alone could
move a bit. BLOCK_M, BLOCK_N, warps, stages and the preload decide who sums, not how (seen bit-equal
on an H200 for one part; the GPU tests repeat it).

Legend: N output features, K input features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from runtime.kernels.stream import square_tile
from runtime.kernels.tile_rules import (
    Overlap,
    num_sms,
    rule_block_k,
    rule_stages,
)

FusedOp = Literal["scaled", "gated", "residual"]

_RULE_VERSION = 4
_TABLED_ARCH = 90
_EVEN_ENOUGH = 1.125  # times the best balance of programs
_FLIGHT_BYTES = 53_248  # of weights on their way to one multiprocessor
_PRELOAD_BYTES = 400  # operands that a thread can hold in registers without spilling
_SMALL_WEIGHT = 1 << 22
_SMALL_BLOCK_K = 64
STAGE_BYTES = 196_608  # shared memory of a pipeline where entries are tabled


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
        overlap: small products win by early starts; large ones lose, since programs that start
            early crowd on the multiprocessors that are free first.
        parts: accumulators along K, each with warps of its own: a power of two, at most the warps.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    preload: bool = False
    parts: int = 1
    overlap: Overlap = "never"


# sm_90, 2-byte elements, (op, N, K); chosen by docs/benchmarks/tune_step.py.
_TABLE: dict[tuple[FusedOp, int, int], FusedConfig] = {
    # SmolLM2-135M: qkv, o, gate and up, down
    ("scaled", 960, 576): FusedConfig(
        block_n=32, block_k=64, num_warps=8, num_stages=3, preload=True, parts=4, overlap="at once"
    ),
    ("residual", 576, 576): FusedConfig(
        block_n=16, block_k=64, num_warps=8, num_stages=3, preload=True, parts=4, overlap="at once"
    ),
    ("gated", 3072, 576): FusedConfig(
        block_n=32, block_k=64, num_warps=8, num_stages=3, preload=True, parts=4, overlap="at once"
    ),
    ("residual", 576, 1536): FusedConfig(
        block_n=16, block_k=64, num_warps=8, num_stages=3, preload=True, parts=8, overlap="at once"
    ),
    # Llama-3.2-1B
    ("scaled", 3072, 2048): FusedConfig(
        block_n=32, block_k=64, num_warps=4, num_stages=6, parts=4, overlap="leads"
    ),
    ("residual", 2048, 2048): FusedConfig(
        block_n=16, block_k=128, num_warps=4, num_stages=6, parts=4
    ),
    ("residual", 2048, 8192): FusedConfig(
        block_n=16, block_k=128, num_warps=4, num_stages=4, parts=4
    ),
    # Qwen3-8B
    ("scaled", 6144, 4096): FusedConfig(
        block_n=64, block_k=128, num_warps=4, num_stages=6, overlap="leads"
    ),
    ("residual", 4096, 4096): FusedConfig(
        block_n=32, block_k=128, num_warps=4, num_stages=4, parts=4
    ),
    ("residual", 4096, 12288): FusedConfig(
        block_n=32, block_k=128, num_warps=4, num_stages=4, parts=4
    ),
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


def is_small_weight(out_features: int, in_features: int) -> bool:
    """Whether a few rows' programs can hold the weight in their registers."""
    return out_features * in_features < _SMALL_WEIGHT


def preloads(config: FusedConfig, block_m: int, in_features: int, element_bytes: int) -> bool:
    """Whether a program of `block_m` rows holds its operands whole; bits do not depend on it."""
    held = (config.block_n + block_m) * part_features(config, in_features) * config.parts
    held *= element_bytes
    return (
        config.preload
        and in_features % config.block_k == 0
        and held <= config.num_warps * 32 * _PRELOAD_BYTES
    )


def part_features(config: FusedConfig, in_features: int) -> int:
    """Return the input features of one part, whole steps; the last parts may hold fewer."""
    steps = -(-in_features // config.block_k)
    return -(-steps // config.parts) * config.block_k


def fitting_stages(config: FusedConfig, block_m: int, element_bytes: int) -> int:
    """Return the depth of the pipeline that fits with so many rows; bits do not depend on it."""
    step_bytes = (config.block_n + block_m) * config.block_k * config.parts * element_bytes
    return max(1, min(config.num_stages, STAGE_BYTES // step_bytes))


def fused_table_facts() -> list[object]:
    """Return everything here that fixes bits, for the digest of all tables."""
    return [
        sorted([*key, asdict(config)] for key, config in _TABLE.items()),
        _RULE_VERSION,
        _TABLED_ARCH,
    ]


def _rule(
    op: FusedOp, out_features: int, in_features: int, *, element_bytes: int, arch: int
) -> FusedConfig:
    """Even out the programs over the multiprocessors, then keep enough weights in flight on each.

    Memory answers after some 700 ns, so 4.8 TB/s take 3.4 MB in flight: 26 kB on each of 132
    multiprocessors. The rule asks for twice as much, for there are gaps.
    """
    least = square_tile(out_features) if op == "residual" else 16
    is_small = element_bytes == 2 and is_small_weight(out_features, in_features)
    if is_small and in_features >= 4 * _SMALL_BLOCK_K and in_features % _SMALL_BLOCK_K == 0:
        # As SmolLM2's tuned entries: parts shorten the chain of sums, weights come early.
        return FusedConfig(
            block_n=max(least, 16 if op == "residual" else 32),
            block_k=_SMALL_BLOCK_K,
            num_warps=8,
            num_stages=3,
            preload=True,
            parts=4,
            overlap="at once",
        )
    count = num_sms(arch)
    sizes = [size for size in (16, 32, 64) if size >= least]
    balance = {size: _imbalance(-(-out_features // size), count) for size in sizes}
    even = [size for size in sizes if balance[size] <= _EVEN_ENOUGH * min(balance.values())]
    # Wide programs read the rows less often, if there are enough of them.
    block_n = max((size for size in even if -(-out_features // size) >= count), default=even[0])
    block_k = rule_block_k(in_features, element_bytes)
    num_programs = -(-out_features // block_n)
    stage_bytes = block_n * block_k * element_bytes * -(-num_programs // count)
    wanted = -(-_FLIGHT_BYTES // stage_bytes)
    deepest = rule_stages(block_n, block_k, element_bytes, arch, most=8)
    return FusedConfig(
        block_n=block_n,
        block_k=block_k,
        num_warps=4,
        num_stages=max(2, min(max(3, wanted), deepest)),
        overlap="leads" if op == "scaled" else "never",  # attention follows, of few programs
    )


def _imbalance(num_programs: int, num_sms: int) -> float:
    """Return how much longer the fullest multiprocessor works than the average one."""
    return -(-num_programs // num_sms) * num_sms / num_programs
