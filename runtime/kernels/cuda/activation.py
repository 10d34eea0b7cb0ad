"""Gated activation on CUDA.

Legend: M rows, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import ceil_div, inner_contiguous

ACTIVATION_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, stride_x, width, BLOCK: tl.constexpr):
    """Compute BLOCK outputs of one row; silu is rounded to the storage dtype before the product."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = x_ptr + row * stride_x + columns
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    y = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_silu_and_mul(gate_up_M2I: torch.Tensor) -> torch.Tensor:
    """Launch `silu_and_mul`."""
    gate_up_M2I = inner_contiguous(gate_up_M2I)
    num_rows = gate_up_M2I.shape[0]
    width = gate_up_M2I.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up_M2I.dtype, device=gate_up_M2I.device)
    if num_rows == 0:
        return out
    silu_and_mul_kernel[(num_rows, ceil_div(width, ACTIVATION_BLOCK))](
        gate_up_M2I, out, gate_up_M2I.stride(0), width, BLOCK=ACTIVATION_BLOCK, num_warps=4
    )
    return out
