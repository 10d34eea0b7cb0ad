"""Keys and values of context positions on CUDA: one program per row and some of its heads.

Legend: M rows, G key heads, P head size, T table positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div, overlap_options, power_of_two
from runtime.kernels.cuda.norm import norm_heads
from runtime.kernels.cuda.rope import rotate_high, rotate_low
from runtime.kernels.norm import RowNorm
from runtime.kv import KVLayer

CONTEXT_WARPS = 4
_MOST_HEADS = 16  # of a row in one program


@triton.jit
def write_context_kernel(
    kv_ptr, norm_ptr, positions_ptr, cos_sin_ptr, slots_ptr, k_pool_ptr, v_pool_ptr, eps,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store BLOCK_H heads of a row: keys normalised and rotated, values as they are."""
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    is_lane = lanes < HALF
    mask = (heads < KV_HEADS) & is_lane
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    angles = cos_sin_ptr + tl.load(positions_ptr + row) * HEAD_DIM + lanes
    keys = kv_ptr + (row * (2 * KV_HEADS) + heads) * HEAD_DIM + lanes
    low = tl.load(keys, mask=mask, other=0.0)
    high = tl.load(keys + HALF, mask=mask, other=0.0)
    v_low = tl.load(keys + KV_HEADS * HEAD_DIM, mask=mask, other=0.0)
    v_high = tl.load(keys + KV_HEADS * HEAD_DIM + HALF, mask=mask, other=0.0)
    cos = tl.load(angles, mask=is_lane, other=0.0)
    sin = tl.load(angles + HALF, mask=is_lane, other=0.0)
    if NORMED:
        low, high = norm_heads(
            low, high,
            tl.load(norm_ptr + lanes, mask=is_lane, other=0.0),
            tl.load(norm_ptr + HALF + lanes, mask=is_lane, other=0.0),
            eps, BLOCK_H, BLOCK_HALF, HEAD_DIM,
        )  # fmt: skip
    first, second = low.to(tl.float32), high.to(tl.float32)
    cos, sin = tl.broadcast_to(cos, first.shape), tl.broadcast_to(sin, first.shape)
    block = slot // KV_BLOCK_SIZE * KV_HEADS + heads
    target = (block * KV_BLOCK_SIZE + slot % KV_BLOCK_SIZE) * HEAD_DIM + lanes
    dtype = k_pool_ptr.dtype.element_ty
    tl.store(k_pool_ptr + target, rotate_low(first, second, cos, sin).to(dtype), mask=mask)
    tl.store(k_pool_ptr + target + HALF, rotate_high(first, second, cos, sin).to(dtype), mask=mask)
    tl.store(v_pool_ptr + target, v_low, mask=mask)
    tl.store(v_pool_ptr + target + HALF, v_high, mask=mask)


def launch_write_context_kv(
    kv_MHP: torch.Tensor,
    norm: RowNorm | None,
    positions_M: torch.Tensor,
    cos_sin_TP: torch.Tensor,
    layer: KVLayer,
    slots_M: torch.Tensor,
) -> None:
    """Launch `write_context_kv`."""
    assert layer.k.is_contiguous(), "the key pool is one block of memory"
    assert layer.v.is_contiguous(), "the value pool is one block of memory"
    assert cos_sin_TP.is_contiguous(), "the rope table is read row by row"
    _, num_kv_heads, kv_block_size, head_dim = layer.k.shape
    num_rows = kv_MHP.shape[0]
    assert kv_MHP.shape[1:] == (2 * num_kv_heads, head_dim), "a key and a value of each head"
    assert cos_sin_TP.shape[1] == head_dim, "the rope table covers the whole head"
    if num_rows == 0:
        return
    kv_MHP = kv_MHP.contiguous()
    constants = context_constants(num_kv_heads, kv_block_size, head_dim, is_normed=norm is not None)
    overlapped, options = overlap_options(kv_MHP.device, None)
    write_context_kernel[(num_rows, ceil_div(num_kv_heads, constants["BLOCK_H"]))](
        kv_MHP,
        kv_MHP if norm is None else norm.weight_D,
        positions_M,
        cos_sin_TP,
        slots_M,
        layer.k,
        layer.v,
        0.0 if norm is None else norm.eps,
        **constants,
        OVERLAP=overlapped,
        num_warps=CONTEXT_WARPS,
        **options,
    )


def context_constants(
    num_kv_heads: int, kv_block_size: int, head_dim: int, *, is_normed: bool
) -> dict[str, int]:
    """Return the compile-time arguments of `write_context_kernel`."""
    return {
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "KV_BLOCK_SIZE": kv_block_size,
        "NORMED": is_normed,
        "BLOCK_H": min(_MOST_HEADS, power_of_two(num_kv_heads)),
        "BLOCK_HALF": power_of_two(head_dim // 2, at_least=16),
    }
