"""Every draft that has a form for rounds on the device drafts there what it drafts eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from runtime.config import RuntimeConfig
from runtime.engine.request import RequestInput
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape
from runtime.spec.types import DeviceProposer, SamplingParams
from tests.engine_harness import World, prompt_of
from tests.fake_graph import FakeGraph, make_llm
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


class PackedGraph(FakeGraph):
    """Runs every round packed: each request's own drafts + 1, then two rows of padding."""

    def packed_row_counts(self, batch: int, num_drafts: int) -> tuple[int, ...]:
        return tuple(range(batch * (num_drafts + 1) + 3))

    def launch(self, shape: RoundShape, buffer: int) -> None:
        state = self.round.state
        is_real = state.slots_B[: shape.batch] != state.padding_slot
        num_rows = int((state.num_drafts_B[: shape.batch] + 1)[is_real].sum()) + 2
        super().launch(replace(shape, num_packed_rows=num_rows), buffer)


def sampled_requests() -> tuple[RequestInput, ...]:
    """Return the requests with options of three kinds: greedy, drawn, drawn after filters."""
    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.4, seed=2**63 - 5),
        SamplingParams(temperature=0.6, top_k=40, top_p=0.9, min_p=0.01, seed=-7, choice_index=2),
        SamplingParams(temperature=0.2, top_p=0.5, seed=11),
    )
    return tuple(
        replace(request, params=params, max_tokens=9)
        for request, params in zip(REQUESTS, kinds, strict=True)
    )


@pytest.mark.parametrize(
    ("make_runner", "asked"),
    [(FakeGraph, REQUESTS), (PackedGraph, REQUESTS), (PackedGraph, sampled_requests())],
    ids=["dense", "packed", "packed-sampled"],
)
def test_drafts_on_the_device_are_the_eager_ones(
    world: World, make_runner: type[FakeGraph], asked: tuple[RequestInput, ...]
) -> None:
    assert world.manifest.draft is not None
    settings = {
        "proposer": world.manifest.draft.algorithm,
        "num_speculative_tokens": 4,
        "max_num_requests": 3,
    }
    eager, _ = make_llm(world, is_eager=True, **settings)
    runners: list[FakeGraph] = []

    def make(round_: DeviceRound, config: RuntimeConfig) -> FakeGraph:
        runners.append(make_runner(round_, config))
        return runners[-1]

    ahead, _ = make_llm(world, make_runner=make, **settings)
    assert isinstance(eager.engine._proposer, DeviceProposer)
    expected, found = eager.generate(asked), ahead.generate(asked)
    for one, other in zip(found, expected, strict=True):
        assert one.ids_target == other.ids_target
        assert structs.replace(one.usage, num_cached_tokens=0) == structs.replace(
            other.usage, num_cached_tokens=0
        )
    stats = ahead.engine.stats()
    assert stats.num_accepted_at == eager.engine.stats().num_accepted_at
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert runners[0].shapes


def test_seeded_requests_draft_alike(world: World) -> None:
    """Drafts on the device are drawn with the noise of the eager path."""
    assert world.manifest.draft is not None
    settings = {
        "proposer": world.manifest.draft.algorithm,
        "num_speculative_tokens": 4,
        "max_num_requests": 3,
    }
    requests = [
        replace(request, max_tokens=12, params=SamplingParams(temperature=0.4 * index, seed=index))
        for index, request in enumerate(REQUESTS[:3])
    ]
    eager, _ = make_llm(world, is_eager=True, **settings)
    ahead, _ = make_llm(world, **settings)
    expected, found = eager.generate(requests), ahead.generate(requests)
    assert [one.ids_target for one in found] == [one.ids_target for one in expected]
    assert ahead.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert ahead.engine.stats().num_device_rounds > 0
