"""Pinned tiles of every dense product: what fixes the order of a row's sums on CUDA.

An entry is chosen by the weight's shape, the element size and the GPU architecture, never by the
number of rows. BLOCK_M alone follows the number of rows: it says which rows share a program, not
how a row is summed (seen bit-equal for 16, 32 and 64 on an H200; the GPU tests repeat it).
A shape outside the table gets an entry from one rule over the same facts.

Head tiles take BLOCK_K from K alone and SPLIT_K = 1, so a head made of some rows of another sums in
the same order.

Legend: N output features, K input features.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from runtime.kernels.fused_table import fused_table_facts
from runtime.kernels.rows import SEGMENT_RULE
from runtime.kernels.tile_rules import (
    BLOCK_M_CHOICES,
    block_m_for,
    num_sms,
    rule_block_k,
    rule_facts,
    rule_stages,
)

__all__ = [
    "ATTENTION_TILE",
    "BLOCK_M_CHOICES",
    "GemmConfig",
    "attention_tile",
    "block_m_for",
    "gemm_config",
    "gemm_table_digest",
    "head_config",
    "is_tabled",
]

ATTENTION_TILE = 256
"""Most keys per inner step of CUDA attention, at absolute multiples of the step."""

_ATTENTION_BYTES = 65_536  # of keys and values in one step

_RULE_VERSION = 1
_MAX_SPLIT_K = 8
_HEAD_STAGES = {64: 3, 128: 4}  # by BLOCK_K; the same bytes on their way
_SMALL_HEAD_STAGES = {64: 4}  # of few programs: one more is on its way; tuned on an H200
_TABLED_ARCH = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """Tile of one dense product.

    Args:
        block_n: output features per program.
        block_k: input features per inner step, a power of two >= 16.
        split_k: parts of K summed apart and added in order 0..split_k - 1.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
    """

    block_n: int
    block_k: int
    split_k: int
    num_warps: int = 4
    num_stages: int = 4


# sm_90, 2-byte elements, (N, K). Block sizes measured on an H200 (bandwidth within a few percent of
# the vendor library at M = 1..8); warps and stages are not tuned yet.
_TABLE: dict[tuple[int, int], GemmConfig] = {
    # SmolLM2-135M: qkv, o, gate and up, down
    (960, 576): GemmConfig(block_n=16, block_k=64, split_k=1),
    (576, 576): GemmConfig(block_n=16, block_k=64, split_k=1),
    (3072, 576): GemmConfig(block_n=16, block_k=64, split_k=1),
    (576, 1536): GemmConfig(block_n=32, block_k=128, split_k=4),
    # Llama-3.2-1B: gate and up, down
    (16384, 2048): GemmConfig(block_n=64, block_k=64, split_k=1),
    (2048, 8192): GemmConfig(block_n=32, block_k=256, split_k=4),
    # Qwen3-8B: qkv, o, gate and up, down
    (6144, 4096): GemmConfig(block_n=64, block_k=128, split_k=1),
    (4096, 4096): GemmConfig(block_n=32, block_k=256, split_k=1),
    (24576, 4096): GemmConfig(block_n=64, block_k=128, split_k=1),
    (4096, 12288): GemmConfig(block_n=64, block_k=128, split_k=2),
}


def gemm_config(
    out_features: int, in_features: int, *, element_bytes: int, arch: int
) -> GemmConfig:
    """Return the pinned tile of a weight.

    Args:
        out_features: N.
        in_features: K.
        element_bytes: size of an element of the inputs, 2 or 4.
        arch: compute capability as major * 10 + minor.
    """
    if is_tabled(out_features, in_features, element_bytes=element_bytes, arch=arch):
        return _TABLE[out_features, in_features]
    return _rule(out_features, in_features, element_bytes=element_bytes, arch=arch)


def is_tabled(out_features: int, in_features: int, *, element_bytes: int, arch: int) -> bool:
    """Whether a weight's tile was tuned, not computed by the rule."""
    return element_bytes == 2 and arch == _TABLED_ARCH and (out_features, in_features) in _TABLE


def head_config(
    out_features: int, in_features: int, *, element_bytes: int, arch: int
) -> GemmConfig:
    """Return the pinned tile of a head; BLOCK_K and SPLIT_K follow K and the element size alone.

    Args:
        out_features: rows of the head.
        in_features: K.
        element_bytes: size of an element of the inputs, 2 or 4.
        arch: compute capability as major * 10 + minor; sets the pipeline's depth only.
    """
    block_n = 128 if out_features >= 32_768 else 64 if out_features >= 16_384 else 32
    if element_bytes == 4:
        block_n = min(block_n, 64)
    block_k = rule_block_k(in_features, element_bytes)
    most = _HEAD_STAGES.get(block_k, max(_HEAD_STAGES.values()))
    if block_n == 32 and element_bytes == 2:
        most = max(most, min(_SMALL_HEAD_STAGES.get(block_k, most), 1 + -(-in_features // block_k)))
    num_stages = rule_stages(block_n, block_k, element_bytes, arch, most=most)
    return GemmConfig(block_n=block_n, block_k=block_k, split_k=1, num_stages=num_stages)


def attention_tile(head_dim: int, *, element_bytes: int) -> int:
    """Return the keys per inner step of CUDA attention: a function of the model's facts alone."""
    tile = ATTENTION_TILE
    while tile > 32 and 2 * tile * head_dim * element_bytes > _ATTENTION_BYTES:
        tile //= 2
    return tile


def gemm_table_digest() -> str:
    """Return the digest of everything here that fixes bits; two processes compare it."""
    facts = {
        "table": sorted([*shape, asdict(config)] for shape, config in _TABLE.items()),
        "tabled_arch": _TABLED_ARCH,
        "rule": [_RULE_VERSION, _MAX_SPLIT_K, *rule_facts()],
        "fused": fused_table_facts(),
        "attention": [SEGMENT_RULE, ATTENTION_TILE, _ATTENTION_BYTES],
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _rule(out_features: int, in_features: int, *, element_bytes: int, arch: int) -> GemmConfig:
    count = num_sms(arch)
    block_n = 64
    while block_n > 16 and -(-out_features // block_n) < count:
        block_n //= 2
    block_k = rule_block_k(in_features, element_bytes)
    num_tiles = -(-out_features // block_n)
    split_k = 1
    while (
        split_k < _MAX_SPLIT_K
        and num_tiles * split_k * 2 <= count
        and in_features >= split_k * 2 * 2 * block_k
    ):
        split_k *= 2
    steps = -(-in_features // block_k)
    while (split_k - 1) * -(-steps // split_k) >= steps:  # the last part would be empty
        split_k -= 1
    return GemmConfig(
        block_n=block_n,
        block_k=block_k,
        split_k=split_k,
        num_stages=rule_stages(block_n, block_k, element_bytes, arch),
    )
