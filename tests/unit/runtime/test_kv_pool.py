"""The paged pool's memory: zero, writable, and not resident before it is used."""

from __future__ import annotations

import resource

import torch

from runtime.kv import KVLayerSpec, KVPool

GIBIBYTE = 1 << 30


def pool(num_blocks: int) -> KVPool:
    return KVPool(
        [KVLayerSpec(num_kv_heads=2, head_dim=64)],
        num_blocks=num_blocks,
        kv_block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_layers_are_zero_and_writable() -> None:
    layer = pool(3).layers[0]
    assert layer.k.shape == (3, 2, 16, 64)
    assert not layer.k.any()
    assert not layer.v.any()
    layer.k[1, 0, 3] = 7
    assert layer.k.sum() == 7 * 64
    assert not layer.v.any()


def test_unused_blocks_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    made = pool(GIBIBYTE // (2 * 2 * 16 * 64 * 4))
    assert made.layers[0].k.nbytes + made.layers[0].v.nbytes == GIBIBYTE
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < GIBIBYTE // 4
