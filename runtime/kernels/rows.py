"""Arithmetic shared by the torch twins, whose bits do not depend on the number of rows.

Library reductions and vectorised transcendentals may treat an element differently by where it lies
in the tensor (scalar tails, thread splits). The twins therefore use operations that IEEE 754 fixes
per element, trees of a fixed shape, and exponentials over padded chunks that no thread splits.

Legend: M rows, D reduced width.
"""

from __future__ import annotations

import torch

ROW_TILE = 16
"""Rows of every CPU matrix product; fewer rows are padded with zeros."""

SEGMENT_RULE = ((64, 256), (1 << 20, 128))
"""Largest head size, ascending, and the keys of an attention segment of heads up to it.

Attention has a program for each segment and key head: with wide heads, few requests and long
segments leave an H200 idle (8B at batch 1: 4,304 us a step with 256 keys, 4,110 with 128). The
digest of `gemm_table` follows this, as another rule makes other bits.
"""

_EXP_CHUNK = 16_384  # below ATen's threading grain of 32,768 elements
_EXP_ALIGN = 64  # elements; whole SIMD registers for every dtype, so no scalar tail
_BASE_ALIGN = 64  # bytes; BLAS libraries may take another kernel for a less aligned operand


def attention_segment(head_dim: int) -> int:
    """Return the keys of an attention segment: a function of the model's head size alone.

    Segments are anchored at absolute positions, the multiples of the result.
    """
    return next(keys for largest, keys in SEGMENT_RULE if head_dim <= largest)


def tree_sum(x_MD: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension by folding halves: the same tree for any number of rows.

    Args:
        x_MD: float32 [..., D], D >= 1; not modified.

    Returns:
        float32 [..., 1].
    """
    width = x_MD.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        head = x_MD[..., :half]
        tail = x_MD[..., half:width]
        if width % 2 == 0:
            x_MD = head + tail
        else:
            x_MD = torch.cat((head[..., : half - 1] + tail, head[..., half - 1 :]), dim=-1)
        width = half
    return x_MD


def fixed_exp(x: torch.Tensor) -> torch.Tensor:
    """Exponentiate so that an element's result depends on its value alone.

    Args:
        x: float32, any shape; not modified.

    Returns:
        float32 of the same shape.
    """
    count = x.numel()
    if count % _EXP_ALIGN == 0 and x.is_contiguous():
        flat, out = x.view(-1), torch.empty_like(x).view(-1)
    else:
        padded = -(-count // _EXP_ALIGN) * _EXP_ALIGN
        flat = torch.zeros(padded, dtype=torch.float32)
        flat[:count] = x.reshape(-1)
        out = flat
    for start in range(0, flat.numel(), _EXP_CHUNK):
        chunk = slice(start, start + _EXP_CHUNK)
        torch.exp(flat[chunk], out=out[chunk])
    return out[:count].view(x.shape)


def pad_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """Return the rows contiguous, aligned and padded with zeros to a multiple of ROW_TILE."""
    num_rows = x_MK.shape[0]
    padded = -(-num_rows // ROW_TILE) * ROW_TILE
    if padded == num_rows and x_MK.is_contiguous() and x_MK.data_ptr() % _BASE_ALIGN == 0:
        return x_MK
    out = x_MK.new_zeros((padded, *x_MK.shape[1:]))
    out[:num_rows] = x_MK
    return out
