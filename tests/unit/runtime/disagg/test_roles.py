"""Prefill there, decode here: the answers, usages and accepted counts of one engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.disagg.frames import Prefilled
from runtime.disagg.outbox import wire_bytes
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests.engine_harness import KV_BLOCK_SIZE, Answer, World, join_deltas, prompt_of
from tests.fake_graph import make_agreeing_world
from tests.pd_harness import Pair, config_of, engine_of, make_pair
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

BLOCKS = {
    "dspark": BlockCase(),
    "dflash": BlockCase(markov=None, sample_from_anchor=False),
}
KINDS = ["eagle3", *BLOCKS, "mtp", "mtp-layers", "eagle", "peagle"]
LENGTHS = (1, 2, KV_BLOCK_SIZE - 1, KV_BLOCK_SIZE, KV_BLOCK_SIZE + 1, 3 * KV_BLOCK_SIZE, 37)


def world_of(kind: str, folder: Path) -> World:
    """Return a tiny target and a draft of the kind that is often right."""
    if kind == "eagle3":
        return make_agreeing_world(folder)
    if kind in BLOCKS:
        return make_block_world(folder, BLOCKS[kind])
    if kind == "peagle":
        return parallel_world(folder)
    name, _, layers = kind.partition("-")
    return last_state_world(folder, name, num_layers=4 if layers else 1)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of(request.param, tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of("eagle3", tmp_path_factory.mktemp("roles"))


def proposer_of(world: World) -> dict[str, Any]:
    assert world.manifest.draft is not None
    return {"proposer": world.manifest.draft.algorithm, "num_speculative_tokens": 4}


def requests_of(*, num_tokens: int = 14) -> tuple[RequestInput, ...]:
    """Return greedy and seeded requests over prompts of one token and at block edges."""
    kinds = (SamplingParams(), SamplingParams(temperature=0.5, seed=3))
    return tuple(
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=prompt_of(40 + index, length),
            params=replace(kinds[index % 2], seed=index),
            max_tokens=num_tokens,
            ignore_eos=True,
            num_speculative_tokens=4 - index % 3,
        )
        for index, length in enumerate(LENGTHS)
    )


def aggregated(
    world: World, requests: tuple[RequestInput, ...], **settings: Any
) -> dict[str, Answer]:
    """Return the answers of one engine that does both."""
    engine, _ = engine_of(world, config_of(world, **settings))
    deltas: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and engine.num_free_places:
            engine.add_request(waiting.pop(0))
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return {name: join_deltas(parts) for name, parts in deltas.items()}


def same(found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> None:
    assert list(found) == list(expected)
    for name, answer in found.items():
        wanted = expected[name]
        assert answer.ids_target == wanted.ids_target, name
        assert (answer.text, answer.finish_reason) == (wanted.text, wanted.finish_reason), name
        assert answer.usage == wanted.usage, name


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_answers_usage_and_accepted_counts_are_those_of_one_engine(
    world: World, pairs: list[Pair], with_graphs: bool
) -> None:
    requests = requests_of()
    settings = proposer_of(world)
    pairs.append(make_pair(world, with_graphs=with_graphs, **settings))
    found = pairs[0].run(requests)
    same(found, aggregated(world, requests, **settings))
    pairs[0].assert_nothing_is_held()
    if with_graphs:
        stats = pairs[0].decode.stats()
        assert stats.num_device_rounds == stats.num_steps  # the first round is on the device, too


def test_bytes_on_the_wire_equal_the_formula(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, **proposer_of(world))
    pairs.append(pair)
    requests = requests_of(num_tokens=2)
    pair.run(requests)
    sizes = [
        2 * layer.k[0].numel() * layer.k.dtype.itemsize
        for layer in pair.caches["decode"].pool.layers
    ]
    by_room = {frame.request_id: frame for frame in pair.wire.answered}
    assert len(by_room) == len(requests)
    for asked in pair.wire.asked:
        answer = by_room[asked.request_id]
        assert isinstance(answer, Prefilled)
        assert answer.num_kv_bytes == wire_bytes(
            len(asked.prompt_ids_target),
            first_position=asked.first_position,
            kv_block_size=KV_BLOCK_SIZE,
            block_bytes=sizes,
        )
    assert pair.decode.num_kv_bytes == pair.prefill.num_kv_bytes > 0
