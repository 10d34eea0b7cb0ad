"""What runs before the first request leaves nothing behind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from runtime.engine.engine import Engine
from runtime.engine.llm import LLM
from runtime.engine.prefill_costs import graph_groups, measured_costs
from runtime.engine.warm_up import row_counts, warm_up
from runtime.graphs.prefill import PrefillShape
from tests.engine_harness import World, make_world
from tests.fake_graph import ids_of, make_llm
from tests.prefill_cases import prefill_request


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("warm"))


def engines_of(llm: LLM) -> tuple[Engine, Engine]:
    """Return eager engines over an LLM's caches, the second one with small chunks."""
    caches = llm.caches
    assert caches is not None
    plain = replace(llm.config, enable_prefix_cache=False)
    first, second = (
        Engine(
            target=llm.models.target,
            target_kv=caches.target_kv,
            proposer=caches.proposer,
            config=settings,
        )
        for settings in (plain, replace(plain, prefill_chunk_size=16))
    )
    return first, second


def test_rows_of_every_size() -> None:
    assert row_counts(16) == (16,)
    assert row_counts(100) == (16, 32, 48, 64, 96, 100)
    counts = row_counts(4096)
    assert counts[-1] == 4096
    pairs = itertools.pairwise(counts[1:])
    assert all(before < after <= 1.5 * before for before, after in pairs)


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
    warm, _ = make_llm(world, **settings)
    engine, chunked = engines_of(warm)
    found = warm_up(engine, chunked)
    assert not engine.has_work
    engine.check()
    assert [rows for rows, _ in found.prefill_s] == [16, 32, 48]
    assert all(seconds > 0 for _, seconds in found.prefill_s)
    assert found.num_steps > 2 * len(found.prefill_s)
    requests = [prefill_request(seed, 5 + 9 * seed) for seed in range(4)]
    assert ids_of(warm.generate(requests)) == ids_of(calm.generate(requests))
    assert warm.engine.stats().num_accepted_at == calm.engine.stats().num_accepted_at


def test_sizes_that_do_not_fit_are_left_out(world: World) -> None:
    llm, _ = make_llm(
        world, proposer="none", num_speculative_tokens=0, max_num_requests=2, num_kv_blocks=9,
        max_num_batched_tokens=128, max_model_len=64,
    )  # fmt: skip
    engine, chunked = engines_of(llm)
    assert [rows for rows, _ in warm_up(engine, chunked).prefill_s] == [16, 32, 48]
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
