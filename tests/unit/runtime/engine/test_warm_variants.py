"""A warm-up compiles every variant of a kernel that eager steps need, judged as for an H200."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

from runtime.batch import ROW_TILE_ROWS, PreparedBatch
from runtime.engine.prefill_costs import PrefillCosts
from runtime.engine.warm_up import attend_everywhere, warm_up
from runtime.kernels.attention import paged_attention
from runtime.kernels.rows import attention_segment
from runtime.kv import KVLayer
from tests.engine_harness import World, make_world
from tests.fake_graph import eager_twin, make_llm
from tests.kernel_variants import Variants, captured_runner
from tests.mixed_load import load
from tests.tiny import EOS_ID, TOKENIZER_SIZE
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world

HALF = (EOS_ID, *range(TOKENIZER_SIZE - 1, 3, -2))
BY_GRAPHS = PrefillCosts(graph_s=defaultdict(float), eager_s=((1, 1.0),))
"""Prompts run by graphs wherever one holds the first of them."""


def world_of(kind: str, folder: Path) -> World:
    if kind in ("mtp", "reduced"):
        token_map = HALF if kind == "reduced" else None
        return last_state_world(folder, "mtp", token_map=token_map, dtype=torch.bfloat16)
    if kind == "dspark":
        return make_block_world(folder, BlockCase(), dtype=torch.bfloat16)
    return make_world(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "has_graphs"),
    [
        ("eagle3", False),
        ("none", True),
        ("ngram", True),
        ("eagle3", True),
        ("mtp", True),
        ("dspark", True),
        ("reduced", False),
        ("reduced", True),
    ],
)
def test_a_mixed_load_needs_no_other_variant(kind: str, has_graphs: bool, tmp_path: Path) -> None:
    world, variants = world_of(kind, tmp_path), Variants()
    longest = min(world.models.target.max_positions, 1024)
    sizes: dict[str, Any] = {"graphs": "off"}
    if has_graphs:  # eager steps are then those that no graph runs, other mixtures of rows
        sizes = {"make_runner": captured_runner(variants), "prefill_costs": BY_GRAPHS}
    if kind == "reduced":
        kind, sizes = "mtp", sizes | {"dynamic_rows": 6, "dynamic_rank": 8}
    llm, _ = make_llm(
        world, proposer=kind, max_num_requests=8, num_speculative_tokens=0 if kind == "none" else 3,
        max_model_len=longest, max_num_batched_tokens=1024, num_kv_blocks=longest + 1,
        prefill_buckets=(32, 64), batch_buckets=(1, 2, 4, 8), **sizes,
    )  # fmt: skip
    caches = llm.caches
    assert caches is not None
    eager = eager_twin(llm)
    with variants.noted():
        warm_up(eager, llm.models, caches)
        warm = set(variants.seen)
        load(llm, longest=longest - 32)
    assert variants.seen == warm
    assert len({name for name, _ in warm}) >= 10


@pytest.mark.parametrize(
    ("heads", "num_kv_heads", "head_dim"),
    [(4, 1, 8), (9, 3, 64), (32, 8, 128), (28, 4, 128), (64, 64, 128)],
)
@pytest.mark.parametrize("most_segments", [1, 2, 9, 150])
def test_attention_of_any_size_has_a_variant_that_was_launched(
    heads: int, num_kv_heads: int, head_dim: int, most_segments: int
) -> None:
    pool = torch.zeros((1, num_kv_heads, 1, head_dim), dtype=torch.bfloat16)
    kind, most_tiles = (heads, KVLayer(k=pool, v=pool)), 200
    variants = Variants()
    with variants.noted(), variants.launching():
        length = most_segments * attention_segment(head_dim)
        attend_everywhere([kind], most_tiles=most_tiles, max_length=length)
        warm = set(variants.seen)
        for num_tiles in range(1, most_tiles + 1):
            for num_segments in {*range(1, min(most_segments, 9) + 1), most_segments}:
                attend(*kind, num_tiles, num_segments)
    assert variants.seen == warm
    assert len(warm) <= 5


def attend(heads: int, layer: KVLayer, num_tiles: int, num_segments: int) -> None:
    """Attend from tiles of 16 rows."""
    rows_N = torch.zeros(num_tiles * ROW_TILE_ROWS, dtype=torch.int64)
    length = num_segments * attention_segment(layer.k.shape[3])
    batch = PreparedBatch(
        ids_target_N=rows_N,
        positions_N=rows_N,
        slots_N=rows_N,
        row_request_N=rows_N.int(),
        block_tables_BT=torch.zeros((1, length), dtype=torch.int32),
        max_length=length - 1,
        tiles_U2=torch.zeros((num_tiles, 2), dtype=torch.int32),
    )
    q_NHP = torch.empty((rows_N.shape[0], heads, layer.k.shape[3]), dtype=layer.k.dtype)
    paged_attention(q_NHP, layer, batch, scale=0.1, window=100)
