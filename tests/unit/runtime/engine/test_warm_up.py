"""What runs before the first request leaves nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from runtime.engine.engine import Engine
from runtime.engine.llm import LLM
from runtime.engine.prefill_costs import graph_groups, measured_costs
from runtime.engine.warm_up import WarmUp, row_counts, warm_up
from runtime.graphs.prefill import PrefillShape
from runtime.kernels.fused_table import FusedOp, fused_config
from runtime.kernels.row_tiles import RowTile, row_tile
from tests.engine_harness import World, make_world
from tests.fake_graph import eager_twin, ids_of, make_llm
from tests.prefill_cases import prefill_request


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("warm"))


def warm(llm: LLM) -> tuple[WarmUp, Engine]:
    """Warm an LLM up in an eager engine over its caches; return that engine, too."""
    caches = llm.caches
    assert caches is not None
    engine = eager_twin(llm)
    return warm_up(engine, llm.models, caches), engine


def test_rows_of_every_size() -> None:
    assert row_counts(16) == (16,)
    assert row_counts(100) == (16, 32, 48, 64, 80, 96, 100)
    counts = row_counts(4096)
    assert counts[-1] == 4096
    pairs = itertools.pairwise(counts[3:])
    assert all(before < after <= 1.25 * before for before, after in pairs)


@pytest.mark.parametrize("op", ["scaled", "gated", "residual"])
@pytest.mark.parametrize("columns", [576, 960, 1024, 28672])
@pytest.mark.parametrize("rows_of_request", [1, 3, 8])
def test_every_row_tile_is_reached(op: FusedOp, columns: int, rows_of_request: int) -> None:
    """By prefills of any number of rows; by rounds, which have so many rows of each request."""
    config = fused_config(op, columns, 576, element_bytes=2, arch=90)

    def tiles(counts: Iterable[int]) -> set[RowTile]:
        sizes = [count * rows_of_request for count in counts]
        return {row_tile(op, config, columns, 576, rows, element_bytes=2) for rows in sizes}

    most = 2048 // rows_of_request
    reached = {max(1, rows // rows_of_request) for rows in row_counts(most * rows_of_request)}
    assert tiles(reached) == tiles(range(1, most + 1))


@pytest.mark.parametrize("proposer", ["eagle3", "ngram"])
def test_a_warm_up_leaves_nothing_behind(world: World, proposer: str) -> None:
    settings = {
        "proposer": proposer,
        "num_speculative_tokens": 2,
        "max_num_requests": 4,
        "max_num_batched_tokens": 48,
        "num_kv_blocks": 60,
    }
    calm, _ = make_llm(world, **settings)
    warmed, _ = make_llm(world, **settings)
    found, engine = warm(warmed)
    assert not engine.has_work
    engine.check()
    assert [rows for rows, _ in found.prefill_s] == [16, 32, 48]
    assert all(seconds > 0 for _, seconds in found.prefill_s)
    assert found.num_steps > 2 * len(found.prefill_s)
    requests = [prefill_request(seed, 5 + 9 * seed) for seed in range(4)]
    assert ids_of(warmed.generate(requests)) == ids_of(calm.generate(requests))
    assert warmed.engine.stats().num_accepted_at == calm.engine.stats().num_accepted_at


def test_sizes_that_do_not_fit_are_left_out(world: World) -> None:
    llm, _ = make_llm(
        world, proposer="none", num_speculative_tokens=0, max_num_requests=2, num_kv_blocks=9,
        max_num_batched_tokens=128, max_model_len=64,
    )  # fmt: skip
    found, engine = warm(llm)
    assert [rows for rows, _ in found.prefill_s] == [16, 32, 48]
    engine.check()


def test_what_was_timed_on_one_side_only_decides_nothing() -> None:
    """A runner given from outside captures prefills and times none of them."""
    graph_s, eager_s = {PrefillShape(num_rows=16, context=256): 0.001}, ((16, 0.01),)
    assert measured_costs({}, eager_s) is None
    assert measured_costs(graph_s, ()) is None
    found = measured_costs(graph_s, eager_s)
    assert found is not None
    groups = graph_groups(tuple(graph_s), [(16, 16)], found)
    assert found.is_cheaper(groups, [16])
