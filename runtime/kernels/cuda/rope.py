"""Rotary embedding on CUDA: one program per row and tensor.

Legend: M rows, H query heads, G key heads, P head size, T table positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, power_of_two


@triton.jit
def rotate_low(first, second, cos, sin):
    """Rotate an element of a head's first half; the contraction is written out, one everywhere."""
    return tl.fma(first, cos, -tl.fma(second, sin, tl.zeros_like(second)))


@triton.jit
def rotate_high(first, second, cos, sin):
    """Rotate an element of a head's second half, as `rotate_low`."""
    return tl.fma(second, cos, tl.fma(first, sin, tl.zeros_like(first)))


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, stride_head, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_H)[:, None]
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < HEADS) & (lanes < HALF)
    source = x_ptr + heads * stride_head + lanes
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out_ptr + heads * (2 * HALF) + lanes
    cos = tl.broadcast_to(cos, first.shape)
    sin = tl.broadcast_to(sin, first.shape)
    low = rotate_low(first, second, cos, sin)
    high = rotate_high(first, second, cos, sin)
    tl.store(target, low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HALF, high.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    positions_ptr,
    table_ptr,
    stride_qm,
    stride_qh,
    stride_km,
    stride_kg,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_QH: tl.constexpr,
    BLOCK_KH: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate the queries (program 0 of axis 1) or the keys (program 1) of one row."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    mask = lanes < HALF
    table_row = table_ptr + position * (2 * HALF) + lanes
    cos = tl.load(table_row, mask=mask, other=0.0)
    sin = tl.load(table_row + HALF, mask=mask, other=0.0)
    if tl.program_id(1) == 0:
        q_out = q_out_ptr + row * (Q_HEADS * 2 * HALF)
        _rotate_heads(
            q_ptr + row * stride_qm, q_out, stride_qh, cos, sin, Q_HEADS, HALF, BLOCK_QH, BLOCK_HALF
        )
    else:
        k_out = k_out_ptr + row * (K_HEADS * 2 * HALF)
        _rotate_heads(
            k_ptr + row * stride_km, k_out, stride_kg, cos, sin, K_HEADS, HALF, BLOCK_KH, BLOCK_HALF
        )


def launch_apply_rope(
    q_MHP: torch.Tensor,
    k_MGP: torch.Tensor,
    positions_M: torch.Tensor,
    cos_sin_TP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `apply_rope`."""
    q_MHP, k_MGP = inner_contiguous(q_MHP), inner_contiguous(k_MGP)
    assert cos_sin_TP.is_contiguous(), "the rope table is read row by row"
    assert cos_sin_TP.shape[1] == q_MHP.shape[2], "the rope table covers the whole head"
    num_rows, num_heads, head_dim = q_MHP.shape
    num_kv_heads = k_MGP.shape[1]
    q_out = torch.empty(q_MHP.shape, dtype=q_MHP.dtype, device=q_MHP.device)
    k_out = torch.empty(k_MGP.shape, dtype=k_MGP.dtype, device=k_MGP.device)
    if num_rows == 0:
        return q_out, k_out
    rope_kernel[(num_rows, 2)](
        q_MHP,
        k_MGP,
        q_out,
        k_out,
        positions_M,
        cos_sin_TP,
        q_MHP.stride(0),
        q_MHP.stride(1),
        k_MGP.stride(0),
        k_MGP.stride(1),
        **rope_constants(num_heads, num_kv_heads, head_dim),
        num_warps=4,
    )
    return q_out, k_out


def rope_constants(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `rope_kernel`."""
    half = head_dim // 2
    return {
        "Q_HEADS": num_heads,
        "K_HEADS": num_kv_heads,
        "HALF": half,
        "BLOCK_QH": power_of_two(num_heads),
        "BLOCK_KH": power_of_two(num_kv_heads),
        "BLOCK_HALF": power_of_two(half),
    }
