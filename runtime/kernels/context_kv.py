"""Keys and values of context positions, from the product of their states into the paged pool.

A block draft has no queries there: what attention does with the keys of new rows stands alone.

Legend: M rows, G key heads, P head size, T table positions.
"""

from __future__ import annotations

import torch

from runtime.kernels.kv_write import write_kv
from runtime.kernels.norm import RowNorm, head_rms_norm
from runtime.kernels.rope import apply_rope
from runtime.kv import KVLayer


def write_context_kv(
    kv_MHP: torch.Tensor,
    norm: RowNorm | None,
    positions_M: torch.Tensor,
    cos_sin_TP: torch.Tensor,
    layer: KVLayer,
    slots_M: torch.Tensor,
) -> None:
    """Normalise and rotate keys, and store them and their values at the rows' slots.

    Args:
        kv_MHP: [M, 2 G, P], keys first; dtype of the pool, contiguous.
        norm: of each key head, or None.
        positions_M: int64, each below T.
        cos_sin_TP: float32 [T, P], P/2 cosines then P/2 sines.
        layer: pool of one layer, written in place.
        slots_M: int64, as in `write_kv`.

    Exactness: the bits of `head_rms_norm`, `apply_rope` and `write_kv` in turn.
    Graph-safe: yes (CUDA).
    """
    if kv_MHP.is_cuda:
        from runtime.kernels.cuda.context_kv import launch_write_context_kv

        launch_write_context_kv(kv_MHP, norm, positions_M, cos_sin_TP, layer, slots_M)
        return
    write_context_kv_twin(kv_MHP, norm, positions_M, cos_sin_TP, layer, slots_M)


def write_context_kv_twin(
    kv_MHP: torch.Tensor,
    norm: RowNorm | None,
    positions_M: torch.Tensor,
    cos_sin_TP: torch.Tensor,
    layer: KVLayer,
    slots_M: torch.Tensor,
) -> None:
    """Compute `write_context_kv` one operation after the other."""
    k_MGP, v_MGP = kv_MHP.chunk(2, dim=1)
    if norm is not None:
        k_MGP = head_rms_norm(k_MGP, norm.weight_D, norm.eps)
    _, k_MGP = apply_rope(k_MGP, k_MGP, positions_M, cos_sin_TP)
    write_kv(k_MGP, v_MGP, layer, slots_M)
