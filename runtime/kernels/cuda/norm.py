"""Root-mean-square norms on CUDA: one program per row or head, a tree fixed by the width.

Legend: M rows, D width, H heads, P head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, overlap_options, power_of_two


@triton.jit
def _normalise(x, w, eps, WIDTH: tl.constexpr):
    mean_square = tl.sum(x * x, axis=0) / WIDTH
    scaled = x * tl.rsqrt(mean_square + eps)
    return scaled.to(w.dtype).to(tl.float32) * w.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    eps,
    stride_row,
    stride_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise head `program % HEADS` of row `program // HEADS`; out is contiguous."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    source = x_ptr + (program // HEADS) * stride_row + (program % HEADS) * stride_head
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(w_ptr + columns, mask=mask, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    y = _normalise(x, w, eps, WIDTH)
    tl.store(out_ptr + program * WIDTH + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch `rms_norm`."""
    return launch_head_rms_norm(x_MD.unsqueeze(1), weight_D, eps).squeeze(1)


def launch_head_rms_norm(
    x_MHP: torch.Tensor, weight_P: torch.Tensor, eps: float, *, overlap: bool | None = None
) -> torch.Tensor:
    """Launch `head_rms_norm`; rows and heads may be strided."""
    x_MHP = inner_contiguous(x_MHP)
    num_rows, num_heads, width = x_MHP.shape
    out = torch.empty((num_rows, num_heads, width), dtype=x_MHP.dtype, device=x_MHP.device)
    if num_rows == 0:
        return out
    is_overlapping, options = overlap_options(x_MHP.device, overlap)
    rms_norm_kernel[(num_rows * num_heads,)](
        x_MHP,
        weight_P,
        out,
        eps,
        x_MHP.stride(0),
        x_MHP.stride(1) if num_heads > 1 else 0,
        HEADS=num_heads,
        **norm_constants(width),
        OVERLAP=is_overlapping,
        num_warps=norm_warps(width),
        **options,
    )
    return out


def norm_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the width."""
    return {"WIDTH": width, "BLOCK": power_of_two(width)}


def norm_warps(width: int) -> int:
    """Return the warps of a norm program, a function of the width alone."""
    return 1 if width <= 256 else 4 if width <= 2048 else 8
