"""Rotary position embedding in the half-split layout of Llama and NeoX.

Element i of a head's first half rotates with element i of its second half. Arithmetic is float32
with one rounding; cosines and sines come from a table made once from integer positions.

Legend: M rows, H query heads, G key heads, P head size, T table positions.
"""

from __future__ import annotations

import torch


def apply_rope(
    q_MHP: torch.Tensor,
    k_MGP: torch.Tensor,
    positions_M: torch.Tensor,
    cos_sin_TP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their absolute positions.

    Args:
        q_MHP: [M, H, P], P even; inner two dimensions contiguous.
        k_MGP: [M, G, P].
        positions_M: int64 [M], each below T.
        cos_sin_TP: float32 [T, P], P/2 cosines then P/2 sines.

    Returns:
        (q, k), new tensors of the inputs' shapes and dtypes.

    Exactness: elementwise.
    Graph-safe: yes (CUDA).
    """
    if q_MHP.is_cuda:
        from runtime.kernels.cuda.rope import launch_apply_rope

        return launch_apply_rope(q_MHP, k_MGP, positions_M, cos_sin_TP)
    return apply_rope_twin(q_MHP, k_MGP, positions_M, cos_sin_TP)


def apply_rope_twin(
    q_MHP: torch.Tensor,
    k_MGP: torch.Tensor,
    positions_M: torch.Tensor,
    cos_sin_TP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `apply_rope` with torch."""
    half = q_MHP.shape[-1] // 2
    rows = cos_sin_TP[positions_M].unsqueeze(1)
    cos, sin = rows[..., :half], rows[..., half:]
    return _rotate(q_MHP, cos, sin), _rotate(k_MGP, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
