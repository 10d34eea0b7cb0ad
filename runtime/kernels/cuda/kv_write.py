"""Copy of new keys and values into the paged pool on CUDA: one program per row.

Legend: M rows, G key heads, P head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, power_of_two
from runtime.kv import KVLayer


@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    stride_km,
    stride_kg,
    stride_vm,
    stride_vg,
    KV_HEADS: tl.constexpr,
    KV_BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Copy one row's keys and values to its slot of [num_blocks, G, kv_block_size, P]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    heads = tl.arange(0, BLOCK_G)[:, None]
    lanes = tl.arange(0, BLOCK_P)[None, :]
    mask = (heads < KV_HEADS) & (lanes < HEAD_DIM)
    block = slot // KV_BLOCK_SIZE
    offset = slot % KV_BLOCK_SIZE
    target = ((block * KV_HEADS + heads) * KV_BLOCK_SIZE + offset) * HEAD_DIM + lanes
    k = tl.load(k_ptr + row * stride_km + heads * stride_kg + lanes, mask=mask, other=0.0)
    v = tl.load(v_ptr + row * stride_vm + heads * stride_vg + lanes, mask=mask, other=0.0)
    tl.store(k_pool_ptr + target, k, mask=mask)
    tl.store(v_pool_ptr + target, v, mask=mask)


def launch_write_kv(
    k_MGP: torch.Tensor, v_MGP: torch.Tensor, layer: KVLayer, slots_M: torch.Tensor
) -> None:
    """Launch `write_kv`."""
    assert layer.k.is_contiguous(), "the key pool is one block of memory"
    assert layer.v.is_contiguous(), "the value pool is one block of memory"
    if k_MGP.shape[0] == 0:
        return
    k_MGP, v_MGP = inner_contiguous(k_MGP), inner_contiguous(v_MGP)
    _, num_kv_heads, kv_block_size, head_dim = layer.k.shape
    write_kv_kernel[(k_MGP.shape[0],)](
        k_MGP,
        v_MGP,
        layer.k,
        layer.v,
        slots_M,
        k_MGP.stride(0),
        k_MGP.stride(1),
        v_MGP.stride(0),
        v_MGP.stride(1),
        **write_kv_constants(num_kv_heads, kv_block_size, head_dim),
        num_warps=4,
    )


def write_kv_constants(num_kv_heads: int, kv_block_size: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `write_kv_kernel`."""
    return {
        "KV_HEADS": num_kv_heads,
        "KV_BLOCK_SIZE": kv_block_size,
        "HEAD_DIM": head_dim,
        "BLOCK_G": power_of_two(num_kv_heads),
        "BLOCK_P": power_of_two(head_dim),
    }
