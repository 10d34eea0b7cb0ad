"""A prefill padded to a bucket equals the eager one: first token, KV, draft state, answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from runtime.config import RuntimeConfig
from runtime.engine.forwards import RowsListener
from runtime.engine.prefill_costs import (
    MOST_IN_TURN,
    PrefillCosts,
    PrefillGroup,
)
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.round import DeviceRound
from runtime.spec.chain import ChainProposer
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, make_world, prompt_of
from tests.fake_graph import BUCKETS, FakeGraph, ids_of, make_llm
from tests.prefill_cases import (
    GAMMA,
    PrefillCase,
    after_prefill,
    one_by_one,
    prefill_request,
    prompts_of,
)
from tests.tiny_grammar import Grammar, parity
from tests.tiny_last_state import last_state_world

EDGES = (1, 7, 8, 9, 24, 25, 40)


def test_a_prefill_leaves_what_the_eager_one_leaves(case: PrefillCase) -> None:
    eager, device, graph = case.pair()
    for length in EDGES:
        request = prefill_request(length, length)
        expected, found = after_prefill(eager, request), after_prefill(device, request)
        assert found[0] == expected[0]
        assert len(found[1]) == len(expected[1]) > 0
        for one, other in zip(found[1], expected[1], strict=True):
            assert torch.equal(one, other), f"prompt of {length}"
    assert prompts_of(graph) == [
        (min(size for size in BUCKETS if size >= length), 0, length) for length in EDGES
    ]


def test_answers_with_prefix_hits_and_long_prompts(case: PrefillCase) -> None:
    """Hits leave a part of a prompt, chunks a last one; both start in the middle."""
    eager, device, graph = case.pair(prefill_chunk_size=32)
    shared = prompt_of(3, 40)
    requests = [
        prefill_request(1, 70),
        prefill_request(2, 33),
        prefill_request(3, 40),
        prefill_request(4, 47, prompt_ids_target=(*shared, *prompt_of(9, 7))),
        prefill_request(5, 40, prompt_ids_target=shared),
    ]
    assert one_by_one(device, requests) == one_by_one(eager, requests)
    assert device.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert device.engine.stats().num_cached_tokens == eager.engine.stats().num_cached_tokens > 0
    starts = [start for _, start, _ in prompts_of(graph)]
    assert starts[:3] == [64, 32, 32]
    assert min(starts[3:]) > 0
    assert device.engine.stats().num_device_rounds > 0
    device.engine.check()


def test_a_late_prompt_is_prefilled_alone_beside_requests_that_decode(agreeing: World) -> None:
    eager, device, graph = PrefillCase("eagle3", agreeing).pair(max_num_requests=3)
    requests = [prefill_request(seed, 5 + 9 * seed, max_tokens=30) for seed in range(4)]
    expected = ids_of(eager.generate(requests))
    got: dict[str, tuple[int, ...]] = {}
    waiting, steps = list(requests), 0
    while waiting or device.engine.has_work:
        if waiting and steps % 4 == 0:
            device.engine.add_request(waiting.pop(0))
        for delta in device.engine.step():
            got[delta.request_id] = got.get(delta.request_id, ()) + delta.ids_target
        device.engine.check()
        steps += 1
    assert got == expected
    assert [count for _, _, count in prompts_of(graph)] == [5, 14, 23, 32]
    stats = device.engine.stats()
    assert stats.num_rows >= sum(len(request.prompt_ids_target) for request in requests)
    assert stats.num_steps == stats.num_device_rounds + len(requests)


def test_preempted_requests_are_prefilled_again(agreeing: World) -> None:
    eager, device, graph = PrefillCase("eagle3", agreeing).pair(
        num_kv_blocks=10,
        max_num_requests=2,
        max_model_len=64,
        enable_prefix_cache=False,
        prefill_buckets=(8, 64),
    )
    requests = [prefill_request(seed, 4 + 5 * seed, max_tokens=32) for seed in range(2)]
    assert ids_of(device.generate(requests)) == ids_of(eager.generate(requests))
    assert device.engine.stats().num_preemptions > 0
    assert [start for _, start, _ in prompts_of(graph)] == [0, 0, 0]
    assert graph.prefills[-1][2] > len(requests[1].prompt_ids_target), "output comes back, too"
    device.engine.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"params": SamplingParams(num_logprobs=1)},
        {"params": SamplingParams(repetition_penalty=1.2)},
        {"masks": Grammar(parity)},
        {"prompt_ids_target": prompt_of(8, 41)},
    ],
    ids=["logprobs", "penalty", "grammar", "long"],
)
def test_other_requests_keep_the_eager_prefill(agreeing: World, fields: dict[str, object]) -> None:
    eager, device, graph = PrefillCase("eagle3", agreeing).pair()
    requests = [prefill_request(1, 12, **fields)]
    assert one_by_one(device, requests) == one_by_one(eager, requests)
    assert graph.prefills == []


def test_few_prompts_are_prefilled_in_turn_and_many_together(agreeing: World) -> None:
    eager, device, graph = PrefillCase("eagle3", agreeing).pair(max_num_requests=MOST_IN_TURN + 1)
    few = [prefill_request(seed, 20 + seed) for seed in range(MOST_IN_TURN)]
    assert ids_of(device.generate(few)) == ids_of(eager.generate(few))
    assert [count for _, _, count in prompts_of(graph)] == [
        20 + seed for seed in range(MOST_IN_TURN)
    ]
    device.engine.check()
    many = [prefill_request(50 + seed, 20 + seed) for seed in range(MOST_IN_TURN + 1)]
    assert ids_of(device.generate(many)) == ids_of(eager.generate(many))
    assert graph.num_prefills == MOST_IN_TURN


def _costs(graph_s: float, launches_s: float, row_s: float) -> PrefillCosts:
    """Return costs: of a graph, whatever its size, and of launches and rows of a forward."""
    shapes = [
        PrefillShape(num_rows=rows, context=128, num_places=max(1, rows // 16)) for rows in BUCKETS
    ]
    return PrefillCosts(
        graph_s=dict.fromkeys(shapes, graph_s),
        eager_s=((16, launches_s + 16 * row_s), (512, launches_s + 512 * row_s)),
    )


@pytest.mark.parametrize(
    ("costs", "num_in_turn"),
    [
        (_costs(1.4e-3, 14e-3, 1e-6), 8),  # as measured for a small model: launches cost most
        (_costs(12e-3, 14e-3, 20e-6), 1),  # a large one: the last prompt alone takes a graph
        (_costs(12e-3, 34e-3, 20e-6), 2),  # three take 36 ms, and 72 rows together 35.4
    ],
)
def test_measured_costs_decide_who_goes_in_turn(
    agreeing: World, costs: PrefillCosts, num_in_turn: int
) -> None:
    eager, device, graph = PrefillCase("eagle3", agreeing).pair(
        max_num_requests=8,
        prefill_costs=costs,
        max_num_batched_tokens=512,
        enable_prefix_cache=False,
    )
    for count in (8, num_in_turn + 1, num_in_turn):
        count = min(count, 8)
        requests = [prefill_request(seed, 24, max_tokens=3) for seed in range(count)]
        assert ids_of(device.generate(requests)) == ids_of(eager.generate(requests))
        assert len(graph.prefills) == (count if count <= num_in_turn else 0)
        graph.prefills.clear()


def test_costs_between_measured_rows_lie_on_a_line() -> None:
    shape = PrefillShape(num_rows=8, context=128)
    costs = PrefillCosts(graph_s={shape: 1.0}, eager_s=((16, 1.0), (32, 3.0), (64, 3.0)))
    assert [costs.joint_s(rows) for rows in (1, 16, 24, 32, 40, 64, 128)] == [1, 1, 2, 3, 3, 3, 6]
    one = PrefillGroup(shape=shape, num_prompts=1)
    assert costs.is_cheaper([one, one], [8, 16])
    assert not costs.is_cheaper([one, one], [8, 8])
    assert not costs.is_cheaper([one], [8, 25])  # the other runs eagerly in any case


def test_a_prompt_that_does_not_fit_takes_the_others_along(agreeing: World) -> None:
    eager, device, graph = PrefillCase("eagle3", agreeing).pair()
    requests = [prefill_request(1, 41), prefill_request(2, 9)]
    assert ids_of(device.generate(requests)) == ids_of(eager.generate(requests))
    assert graph.prefills == []


def test_a_listener_keeps_the_eager_prefill(agreeing: World) -> None:
    _, device, graph = PrefillCase("eagle3", agreeing).pair()
    layers: list[int] = []
    device.engine.add_request(prefill_request(3, 12))
    listener = RowsListener(
        on_sent_off=lambda _: None, on_layer=lambda layer, _: layers.append(layer)
    )
    device.own_engine.step(listener)
    assert layers == list(range(device.models.target.num_layers))
    assert graph.prefills == []


class ShortByOne(FakeGraph):
    """Negative control: the last row of every prompt is taken for padding."""

    def launch_prefill(self, shape: PrefillShape) -> None:
        assert self.round.prefill is not None
        self.round.prefill.inputs_X[2 * shape.num_places] -= 1
        super().launch_prefill(shape)


def test_a_wrong_prefill_is_seen(agreeing: World) -> None:
    settings = {"proposer": "eagle3", "num_speculative_tokens": GAMMA, "max_num_requests": 1}
    requests = [prefill_request(seed, 12 + seed) for seed in range(4)]
    right, _ = make_llm(agreeing, is_eager=True, **settings)
    wrong, _ = make_llm(agreeing, make_runner=ShortByOne, **settings)
    assert ids_of(right.generate(requests)) != ids_of(wrong.generate(requests))


def test_a_draft_that_missed_the_prompt_is_seen(
    agreeing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the draft's part of a prefill matters to acceptance."""
    requests = [prefill_request(seed, 12 + seed) for seed in range(4)]
    eager, device, _ = PrefillCase("eagle3", agreeing).pair()
    monkeypatch.setattr(ChainProposer, "observe_prefill", lambda *_: None)
    assert one_by_one(device, requests) == one_by_one(eager, requests)
    assert device.engine.stats().num_accepted_at != eager.engine.stats().num_accepted_at


def test_sizes_and_the_switch(tmp_path_factory: pytest.TempPathFactory) -> None:
    world = make_world(tmp_path_factory.mktemp("switch"))
    made: list[DeviceRound] = []

    def make(round_: DeviceRound, config: RuntimeConfig) -> FakeGraph:
        made.append(round_)
        return FakeGraph(round_, config)

    def rows(**settings: object) -> list[int]:
        make_llm(world, make_runner=make, **settings)
        prefill = made[-1].prefill
        shapes = () if prefill is None else prefill.shapes
        return [shape.num_rows for shape in shapes if shape.kind == "greedy"]

    assert rows(prefill_buckets=()) == []
    sizes = {"prefill_buckets": (16, 4, 300, 600), "max_model_len": 200}
    assert rows(**sizes, max_num_requests=1) == [300, 16, 4]
    assert rows(**sizes, max_num_requests=2) == [600, 300, 16, 4]
    assert rows(**sizes, max_num_requests=2, max_num_batched_tokens=300) == [300, 16, 4]
    assert rows(prefill_buckets=(16, 4), max_model_len=512) == [16, 16, 4, 4]
    layered = last_state_world(tmp_path_factory.mktemp("layers"), "mtp", num_layers=3)
    make_llm(layered, make_runner=make, proposer="mtp", num_speculative_tokens=3)
    assert made[-1].prefill is None, "several prediction layers are prefilled eagerly"


def test_a_slot_is_written_before_the_token_of_its_prompt_is_read(
    agreeing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the prefill and the first round only where the request stands is missing."""
    _, device, graph = PrefillCase("eagle3", agreeing).pair()
    calls: list[str] = []

    def noted(*given: object, name: str, call: Callable[..., object]) -> object:
        calls.append(name)
        return call(*given)

    for owner, name in (
        (graph.round.state, "write_requests"),
        (graph.round.state, "write_newest"),
        (graph, "launch_prefill"),
        (graph, "read_prefill"),
        (graph, "launch"),
    ):
        monkeypatch.setattr(owner, name, partial(noted, name=name, call=getattr(owner, name)))
    device.engine.add_request(prefill_request(3, 12))
    device.engine.step()
    device.engine.step()
    assert calls[:6] == [
        "launch_prefill",
        "write_requests",
        "write_newest",  # of `write_requests`
        "read_prefill",
        "write_newest",
        "launch",
    ]
