"""A warm-up runs every variant of attention that a mixed load needs, judged as for an H200."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

from runtime.batch import ROW_TILE_ROWS, PreparedBatch
from runtime.engine.engine import Engine
from runtime.engine.warm_up import TAIL_CHUNK, warm_up
from runtime.kernels import attention
from runtime.kernels.cuda import attention as launches
from runtime.kernels.rows import SEGMENT
from runtime.kv import KVLayer
from tests.engine_harness import make_world
from tests.fake_graph import make_llm
from tests.mixed_load import load


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_a_mixed_load_needs_no_other_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    variants: set[tuple[object, ...]] = set()
    twin = attention.paged_attention_twin
    monkeypatch.setattr(launches, "device_arch", lambda _device: 90)

    def noted(
        q: torch.Tensor, layer: KVLayer, batch: PreparedBatch, **options: Any
    ) -> torch.Tensor:
        variants.add(variant_of(q, layer, batch))
        return twin(q, layer, batch, **options)

    monkeypatch.setattr(attention, "paged_attention_twin", noted)
    world = make_world(tmp_path)
    longest = min(world.models.target.max_positions, 1024)
    llm, _ = make_llm(
        world, is_eager=True, graphs="off", proposer=kind, max_num_requests=8,
        num_speculative_tokens=0 if kind == "none" else 3, max_model_len=longest,
        max_num_batched_tokens=1024, num_kv_blocks=longest + 1,
    )  # fmt: skip
    caches = llm.caches
    assert caches is not None
    plain = replace(llm.config, enable_prefix_cache=False)
    engines = [
        Engine(
            target=llm.models.target,
            target_kv=caches.target_kv,
            proposer=caches.proposer,
            config=settings,
        )
        for settings in (plain, replace(plain, prefill_chunk_size=TAIL_CHUNK))
    ]
    warm_up(*engines)
    warm = set(variants)
    load(llm, longest=longest - 32)
    assert variants == warm
    assert len(warm) >= 5


def variant_of(q: torch.Tensor, layer: KVLayer, batch: PreparedBatch) -> tuple[object, ...]:
    """Return what selects the binary of a launch with this batch on CUDA."""
    num_kv_heads = layer.k.shape[1]
    is_tiled = batch.rows_per_request is None and batch.tiles_U2 is not None
    width = ROW_TILE_ROWS if is_tiled else batch.rows_per_request or 1
    constants = launches.segment_constants(
        q.shape[1], num_kv_heads, q.shape[2], layer.k.shape[2], width, 2
    )
    groups = q.shape[0] // width if batch.tiles_U2 is None or not is_tiled else len(batch.tiles_U2)
    num_programs = groups * constants["PARTS"] * num_kv_heads
    num_segments = -(-batch.max_length // SEGMENT)
    in_turn = launches.goes_in_turn(q.device, num_programs, num_segments, width)
    num_parts = 1 if in_turn else num_segments
    warps = launches.segment_warps(q.device, num_programs * num_parts)
    return (q.shape[1:], num_kv_heads, width, is_tiled, num_segments == 1, in_turn, warps)
