"""Every draft that has a form for rounds on the device drafts there what it drafts eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.engine.request import RequestInput
from runtime.spec.types import DeviceProposer
from tests.engine_harness import World, prompt_of
from tests.fake_graph import make_llm
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(30 + index, 3 + 7 * index),
        max_tokens=24,
        ignore_eos=True,
        num_speculative_tokens=4 - index % 3,
    )
    for index in range(4)
)
BLOCKS = {
    "dspark": BlockCase(),
    "dspark-slot-0-silent": BlockCase(markov="rnn", sample_from_anchor=False, sliding_window=12),
    "dspark-gated": BlockCase(markov="gated", draft_vocab_size=None),
    "dflash": BlockCase(markov=None, sample_from_anchor=False),
}


@pytest.fixture(scope="module", params=[*BLOCKS, "mtp", "mtp-layers", "eagle", "peagle"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("device")
    if request.param in BLOCKS:
        return make_block_world(folder, BLOCKS[request.param])
    if request.param == "peagle":
        return parallel_world(folder)
    kind, _, layers = request.param.partition("-")
    return last_state_world(folder, kind, num_layers=4 if layers else 1)


def test_drafts_on_the_device_are_the_eager_ones(world: World) -> None:
    assert world.manifest.draft is not None
    settings = {
        "proposer": world.manifest.draft.algorithm,
        "num_speculative_tokens": 4,
        "max_num_requests": 3,
    }
    eager, _ = make_llm(world, is_eager=True, **settings)
    ahead, (graph,) = make_llm(world, **settings)
    assert isinstance(eager.engine._proposer, DeviceProposer)
    expected, found = eager.generate(REQUESTS), ahead.generate(REQUESTS)
    for one, other in zip(found, expected, strict=True):
        assert one.ids_target == other.ids_target
        assert replace(one.usage, num_cached_tokens=0) == replace(other.usage, num_cached_tokens=0)
    stats = ahead.engine.stats()
    assert stats.num_accepted_at == eager.engine.stats().num_accepted_at
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert graph.shapes
