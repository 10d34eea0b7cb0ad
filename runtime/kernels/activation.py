"""Gated activation of the feed-forward layers.

Rounding points are those of `transformers`: silu in float32, rounded to the storage dtype, then
multiplied by the up projection in the storage dtype.

Legend: M rows, I intermediate size; the input holds gate then up, 2 I wide.
"""

from __future__ import annotations

import torch

from runtime.kernels.rows import fixed_exp


def silu_and_mul(gate_up_M2I: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up.

    Args:
        gate_up_M2I: [M, 2 I], gate in the first half.

    Returns:
        [M, I], same dtype.

    Exactness: elementwise.
    Graph-safe: yes (CUDA).
    """
    if gate_up_M2I.is_cuda:
        from runtime.kernels.cuda.activation import launch_silu_and_mul

        return launch_silu_and_mul(gate_up_M2I)
    return silu_and_mul_twin(gate_up_M2I)


def silu_and_mul_twin(gate_up_M2I: torch.Tensor) -> torch.Tensor:
    """Compute `silu_and_mul` with torch."""
    half = gate_up_M2I.shape[-1] // 2
    gate = gate_up_M2I[:, :half].float()
    silu = gate / (1.0 + fixed_exp(-gate))
    return silu.to(gate_up_M2I.dtype) * gate_up_M2I[:, half:]
