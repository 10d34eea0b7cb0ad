"""Prompts that share a prefill on the device, and prefills behind rounds that nobody read yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from runtime.engine import prefills
from runtime.engine.prefill_costs import PrefillCosts, PrefillGroup, graph_groups
from runtime.graphs.prefill import PrefillShape, first_rows
from tests.engine_harness import World
from tests.fake_graph import ids_of
from tests.prefill_cases import (
    PrefillCase,
    check_one_prefill,
    crowd,
    prefill_request,
    prompts_of,
)

PACKED = (24, 48, 96, 160)  # rows of prefills of up to 1, 3, 6 and 8 prompts


@pytest.mark.parametrize("lengths", [(1, 1), (16, 16, 16), (7, 33, 17, 1, 24), (40,) * 8])
def test_prompts_in_one_prefill_leave_what_eager_ones_leave(
    case: PrefillCase, lengths: tuple[int, ...]
) -> None:
    eager, device, graph = case.pair(max_num_requests=8, prefill_buckets=PACKED)
    check_one_prefill(eager, device, lengths)
    assert [count for _, _, count in prompts_of(graph)] == list(lengths)
    assert graph.num_prefills < len(lengths)


def test_prompts_in_one_prefill_give_the_same_answers(case: PrefillCase) -> None:
    """Prefix hits and requests that come while others decode; some prefills start in the middle."""
    eager, device, graph = case.pair(max_num_requests=6, prefill_buckets=PACKED)
    requests = crowd(12)
    assert ids_of(device.generate(requests)) == ids_of(eager.generate(requests))
    assert device.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert 0 < graph.num_prefills < len(graph.prefills)
    assert any(start for _, start, _ in prompts_of(graph))
    device.engine.check()


def test_where_prompts_lie() -> None:
    assert list(first_rows([1, 16, 17, 5])) == [0, 16, 32, 64]
    assert list(first_rows([])) == []


def test_what_a_prefill_holds() -> None:
    shape = PrefillShape(num_rows=64, context=100, num_places=3)
    fits = partial(_num_fitting, shape)
    assert [fits(64), fits(65), fits(16, 16, 16, 16)] == [1, 0, 3]
    assert [fits(1, 1, 32), fits(1, 1, 33), fits(17, 32), fits(17, 33)] == [3, 2, 2, 1]
    assert shape.num_fitting([8, 8, 8], [8, 101, 8]) == 1


def _num_fitting(shape: PrefillShape, *lengths: int) -> int:
    return shape.num_fitting(lengths, lengths)


def test_prompts_are_divided_by_what_a_row_costs() -> None:
    shapes = [
        PrefillShape(num_rows=rows, context=context, num_places=rows // 16)
        for rows in (256, 64, 32)
        for context in (512, 128)
    ]

    def sizes(*lengths: int, costs: PrefillCosts | None = None) -> list[tuple[int, int, int]]:
        groups = graph_groups(shapes, [(length, length) for length in lengths], costs)
        return [(item.shape.num_rows, item.shape.context, item.num_prompts) for item in groups]

    assert sizes(30) == [(32, 128, 1)]
    assert sizes(30, 30) == [(64, 128, 2)]
    assert sizes(*[30] * 10) == [(256, 128, 8), (64, 128, 2)]
    assert sizes(200, 20) == [(256, 512, 2)]
    assert sizes(300) == []
    assert sizes(20, 300, 20) == [(32, 128, 1)]
    seconds = {shape: 1.0 if shape.num_rows == 256 else 0.1 for shape in shapes}
    dear = PrefillCosts(graph_s=seconds, eager_s=((16, 1.0),))
    assert sizes(*[30] * 4, costs=dear) == [(64, 128, 2), (64, 128, 2)]


@pytest.mark.parametrize("kind", ["none", "eagle3"])
@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_prompts_that_come_while_others_decode_wait_for_no_round(
    agreeing: World, kind: str, num_requests: int
) -> None:
    """A prefill is launched behind unread rounds, one round of the others behind it."""
    eager, device, graph = PrefillCase(kind, agreeing).pair(
        max_num_requests=num_requests, prefill_buckets=PACKED, max_model_len=128
    )
    requests = [
        prefill_request(seed, 5 + seed, max_tokens=7 + 5 * (seed % 4)) for seed in range(20)
    ]
    assert ids_of(device.generate(requests)) == ids_of(eager.generate(requests))
    assert device.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert graph.num_prefills > 1
    if num_requests > 1:
        assert max(graph.num_unread_at_prefill) == 1
    device.engine.check()


def test_prompts_are_divided_once_for_each_prefill(
    agreeing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, device, graph = PrefillCase("eagle3", agreeing).pair(
        max_num_requests=2, prefill_buckets=PACKED
    )
    num_divided: list[int] = []

    def noted(
        shapes: Sequence[PrefillShape],
        prompts: Sequence[tuple[int, int]],
        costs: PrefillCosts | None,
    ) -> tuple[PrefillGroup, ...]:
        num_divided.append(len(prompts))
        return graph_groups(shapes, prompts, costs)

    monkeypatch.setattr(prefills, "graph_groups", noted)
    device.generate([prefill_request(seed, 9, max_tokens=12 + seed) for seed in range(6)])
    assert max(graph.num_unread_at_prefill) == 1
    assert len([count for count in num_divided if count]) == graph.num_prefills


def test_a_prompt_is_aborted_behind_a_round(agreeing: World) -> None:
    eager, device, _ = PrefillCase("eagle3", agreeing).pair(
        max_num_requests=2, prefill_buckets=PACKED
    )
    requests = [prefill_request(seed, 9, max_tokens=12 + 20 * (seed == 1)) for seed in range(4)]
    expected = ids_of(eager.generate([requests[1], requests[3]]))
    got: dict[str, tuple[int, ...]] = {}
    for request in requests:
        device.engine.add_request(request)
    is_aborted = False
    while device.engine.has_work:
        for delta in device.engine.step():
            got[delta.request_id] = got.get(delta.request_id, ()) + delta.ids_target
        third = device.own_engine.find(requests[2].request_id)
        if not is_aborted and third is not None and third.placement is not None:
            assert third.placed.is_under_way
            is_aborted = device.engine.abort(third.request_id)
        device.engine.check()
    assert is_aborted
    assert requests[2].request_id not in got
    assert got[requests[1].request_id] == expected[requests[1].request_id]
    assert got[requests[3].request_id] == expected[requests[3].request_id]
