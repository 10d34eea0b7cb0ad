"""Prompts of requests that sample are prefilled on the device, with the draws of the eager path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.engine.request import RequestInput
from runtime.graphs.slot_sampling import SamplingState
from runtime.spec.types import SamplingParams
from tests.engine_harness import World
from tests.fake_graph import FakeGraph, ids_of
from tests.prefill_cases import (
    FILTERED,
    SAMPLED,
    PrefillCase,
    check_one_prefill,
    crowd,
    prompts_of,
)

GREEDY = SamplingParams()
LAWS = (SAMPLED, GREEDY, FILTERED)
PACKED = (24, 96)  # rows of prefills of up to 1 and 6 prompts


def _mixed(count: int, laws: tuple[SamplingParams, ...] = LAWS) -> list[RequestInput]:
    return [replace(request, params=laws[i % len(laws)]) for i, request in enumerate(crowd(count))]


def _kinds(graph: FakeGraph) -> set[str]:
    return {shape.kind for shape, _, _ in graph.prefills}


@pytest.mark.parametrize("laws", [(SAMPLED,), (SAMPLED, GREEDY), (FILTERED,), LAWS])
def test_sampled_prompts_leave_what_eager_ones_leave(
    case: PrefillCase, laws: tuple[SamplingParams, ...]
) -> None:
    eager, device, graph = case.pair(max_num_requests=6, prefill_buckets=PACKED)
    check_one_prefill(eager, device, (7, 17, 1, 24), laws)
    assert [count for _, _, count in prompts_of(graph)] == [7, 17, 1, 24]
    assert _kinds(graph) == {"filtered" if FILTERED in laws else "sampled"}


@pytest.mark.parametrize("verification", ["seeded", "rejection"])
def test_answers_beside_requests_that_decode(case: PrefillCase, verification: str) -> None:
    """Slots pass from one law to another; prefix hits start in the middle."""
    eager, device, graph = case.pair(
        max_num_requests=4, prefill_buckets=PACKED, verification=verification
    )
    requests = _mixed(12)
    assert ids_of(device.generate(requests)) == ids_of(eager.generate(requests))
    assert device.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert device.engine.stats().num_device_rounds > 0
    assert "filtered" in _kinds(graph)
    assert ("sampled" in {shape.kind for shape in graph.prefill_shapes}) == (
        verification == "seeded"
    )
    device.engine.check()


def test_greedy_prompts_keep_their_own_graphs(agreeing: World) -> None:
    """Others have graphs of the longest context only."""
    _, device, graph = PrefillCase("eagle3", agreeing).pair(
        prefill_buckets=PACKED, max_model_len=512
    )
    device.generate(_mixed(4, (GREEDY,)))
    assert _kinds(graph) == {"greedy"}
    assert [(item.kind, item.context) for item in graph.prefill_shapes if item.num_rows == 24] == [
        ("greedy", 512),
        ("greedy", 256),
        ("sampled", 512),
        ("filtered", 512),
    ]


def test_a_prefill_that_does_not_know_the_law_is_seen(
    agreeing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the first token follows from the slot's own numbers."""
    eager, device, graph = PrefillCase("eagle3", agreeing).pair(prefill_buckets=PACKED)
    requests = [replace(item, max_tokens=1) for item in _mixed(6, (SAMPLED,))]
    expected = ids_of(eager.generate(requests))
    monkeypatch.setattr(SamplingState, "write", lambda *_: None)
    assert ids_of(device.generate(requests)) != expected
    assert _kinds(graph) == {"sampled"}
