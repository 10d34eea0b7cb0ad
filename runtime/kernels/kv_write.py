"""Copy of new keys and values into the paged pool.

Legend: M rows, G key heads, P head size.
"""

from __future__ import annotations

import torch

from runtime.kv import KVLayer


def write_kv(
    k_MGP: torch.Tensor, v_MGP: torch.Tensor, layer: KVLayer, slots_M: torch.Tensor
) -> None:
    """Store each row's key and value at its slot.

    Args:
        k_MGP: [M, G, P], dtype of the pool.
        v_MGP: [M, G, P].
        layer: pool of one layer, written in place.
        slots_M: int64 [M], block * kv_block_size + offset. Rows that share a slot (padding rows)
            leave one of them there.

    Exactness: a copy.
    Graph-safe: yes (CUDA).
    """
    if k_MGP.is_cuda:
        from runtime.kernels.cuda.kv_write import launch_write_kv

        launch_write_kv(k_MGP, v_MGP, layer, slots_M)
        return
    write_kv_twin(k_MGP, v_MGP, layer, slots_M)


def write_kv_twin(
    k_MGP: torch.Tensor, v_MGP: torch.Tensor, layer: KVLayer, slots_M: torch.Tensor
) -> None:
    """Compute `write_kv` with torch."""
    kv_block_size = layer.k.shape[2]
    blocks_M = slots_M // kv_block_size
    offsets_M = slots_M % kv_block_size
    layer.k[blocks_M, :, offsets_M] = k_MGP
    layer.v[blocks_M, :, offsets_M] = v_MGP
