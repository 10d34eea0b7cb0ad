"""Rounds launched ahead of the host change nothing: stops, aborts, preemption, lack of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from runtime.config import Overrides, resolve_config
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, make_world, prompt_of
from tests.fake_graph import FakeGraph, ids_of, make_llm

REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 5 * index),
        max_tokens=10 + 3 * index,
        ignore_eos=True,
    )
    for index in range(8)
)


@pytest.fixture(scope="module")
def answers(agreeing: World) -> tuple[Completion, ...]:
    """Answers of a target-only eager engine."""
    llm, _ = make_llm(agreeing, is_eager=True, proposer="none")
    return llm.generate(REQUESTS)


def _same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.request_id, one.ids_target, one.text, one.finish_reason) == (
            (other.request_id, other.ids_target, other.text, other.finish_reason)
        )


def _both(
    world: World, requests: Sequence[RequestInput], **settings: object
) -> tuple[LLM, FakeGraph]:
    """Run requests eagerly and a round ahead; answers, usages and counts must be equal."""
    eager, _ = make_llm(world, is_eager=True, **settings)
    ahead, (graph,) = make_llm(world, **settings)
    expected, found = eager.generate(requests), ahead.generate(requests)
    _same(found, expected)
    for one, other in zip(found, expected, strict=True):
        assert structs.replace(one.usage, num_cached_tokens=0) == structs.replace(
            other.usage, num_cached_tokens=0
        )
    for name in ("num_rounds", "num_drafts", "num_accepted_at", "num_output_tokens", "finished"):
        assert getattr(ahead.engine.stats(), name) == getattr(eager.engine.stats(), name), name
    ahead.engine.check()
    assert ahead.engine.stats().num_free_kv_blocks == ahead.engine.stats().num_kv_blocks
    return ahead, graph


@pytest.mark.parametrize(
    ("proposer", "gamma", "num_requests"),
    [("none", 0, 3), ("eagle3", 1, 2), ("eagle3", 4, 1), ("eagle3", 4, 8)],
)
def test_rounds_ahead_equal_eager_ones(
    agreeing: World,
    answers: tuple[Completion, ...],
    proposer: str,
    gamma: int,
    num_requests: int,
) -> None:
    llm, graph = _both(
        agreeing,
        REQUESTS,
        proposer=proposer,
        num_speculative_tokens=gamma,
        max_num_requests=num_requests,
    )
    _same(llm.generate(REQUESTS[:3]), answers[:3])
    stats = llm.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert graph.num_unread_at_launch.count(1) > graph.num_unread_at_launch.count(0)
    assert len({shape.context for shape in graph.shapes}) > 1


def test_a_request_may_have_fewer_drafts(agreeing: World) -> None:
    requests = [
        replace(request, num_speculative_tokens=index % 4) for index, request in enumerate(REQUESTS)
    ]
    llm, _ = _both(
        agreeing, requests, proposer="eagle3", num_speculative_tokens=3, max_num_requests=5
    )
    assert llm.engine.stats().num_device_rounds > 0


def test_ends_by_token_string_and_length_drop_what_ran_ahead(
    agreeing: World, answers: tuple[Completion, ...]
) -> None:
    requests = []
    for index, (request, answer) in enumerate(zip(REQUESTS, answers, strict=True)):
        requests.append(
            (
                replace(request, stop_ids=(answer.ids_target[3 + index],)),
                replace(request, stop=(answer.text[4 + index : 7 + index],)),
                replace(request, max_tokens=1 + index),
                replace(request, ignore_eos=False),
            )[index % 4]
        )
    _both(agreeing, requests, proposer="eagle3", num_speculative_tokens=3, max_num_requests=3)


@pytest.mark.parametrize("num_kv_blocks", [13, 20])
def test_lack_of_blocks_and_preemption(
    agreeing: World, answers: tuple[Completion, ...], num_kv_blocks: int
) -> None:
    llm, _ = make_llm(
        agreeing,
        proposer="eagle3",
        num_speculative_tokens=4,
        max_num_requests=6,
        num_kv_blocks=num_kv_blocks,
        max_model_len=96,
    )
    _same(llm.generate(REQUESTS), answers)
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_device_rounds > 0
    llm.engine.check()


def test_the_end_of_the_context_is_left_to_the_eager_path(agreeing: World) -> None:
    requests = [replace(request, max_tokens=None) for request in REQUESTS[1:4]]
    _, graph = _both(
        agreeing, requests, proposer="eagle3", num_speculative_tokens=4, max_model_len=64
    )
    assert max(shape.context for shape in graph.shapes) == 64


def test_the_end_of_the_draft_s_context(tmp_path_factory: pytest.TempPathFactory) -> None:
    world = make_world(tmp_path_factory.mktemp("short"), draft_positions=40)
    requests = [replace(request, max_tokens=40) for request in REQUESTS[:6]]
    llm, _ = _both(world, requests, proposer="eagle3", num_speculative_tokens=4)
    assert llm.engine.stats().num_device_rounds > 0


def test_sampled_requests_and_late_arrivals_drain_the_pipeline(
    agreeing: World, answers: tuple[Completion, ...]
) -> None:
    llm, _ = make_llm(agreeing, proposer="eagle3", num_speculative_tokens=3, max_num_requests=8)
    sampled = RequestInput(
        request_id="sampled",
        prompt_ids_target=prompt_of(99, 7),
        params=SamplingParams(temperature=1.0, seed=5),
        max_tokens=12,
    )
    late = {3: REQUESTS[4], 7: sampled, 12: REQUESTS[5]}
    ids: dict[str, list[int]] = {}
    for request in REQUESTS[:3]:
        llm.engine.add_request(request)
    step = 0
    while llm.engine.has_work or step <= max(late):
        if step in late:
            llm.engine.add_request(late[step])
        for delta in llm.engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.ids_target)
        llm.engine.check()
        step += 1
    eager, _ = make_llm(agreeing, is_eager=True, proposer="none")
    (expected,) = eager.generate([sampled])
    assert tuple(ids.pop("sampled")) == expected.ids_target
    wanted = ids_of(answers)
    assert {name: tuple(found) for name, found in ids.items()} == {
        name: wanted[name] for name in ("r0", "r1", "r2", "r4", "r5")
    }


@pytest.mark.parametrize("num_steps", [2, 3, 6])
@pytest.mark.parametrize("event", ["abort", "preempt", "flush"])
def test_abort_preemption_and_flush_in_flight(
    agreeing: World, answers: tuple[Completion, ...], event: str, num_steps: int
) -> None:
    llm, _ = make_llm(agreeing, proposer="eagle3", num_speculative_tokens=3)
    engine = llm.engine
    for request in REQUESTS[:4]:
        engine.add_request(request)
    ids: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS[:4]}
    waiting = [REQUESTS[7]]
    step = 0
    while engine.has_work or waiting:
        if step == num_steps:
            if event == "abort":
                assert engine.abort("r1")
                engine.add_request(waiting.pop())  # takes over slot and blocks at once
                ids["r7"] = []
            elif event == "preempt":
                engine._scheduler.preempt(engine._scheduler.running[1])
            else:
                engine.flush_cache()
        if step == num_steps + 3:
            waiting.clear()
        for delta in engine.step():
            ids[delta.request_id].extend(delta.ids_target)
        engine.check()
        step += 1
    wanted = ids_of(answers)
    if event == "abort":
        aborted = tuple(ids.pop("r1"))
        assert wanted["r1"][: len(aborted)] == aborted
    assert {name: tuple(found) for name, found in ids.items()} == {
        name: wanted[name] for name in ids
    }


def test_everyone_leaves_with_rounds_in_flight(agreeing: World) -> None:
    llm, (graph,) = make_llm(agreeing, proposer="eagle3", num_speculative_tokens=3)
    expected, _ = make_llm(agreeing, is_eager=True, proposer="none")
    for request in REQUESTS[:2]:
        llm.engine.add_request(request)
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.abort("r0")
    assert llm.engine.abort("r1")
    assert not llm.engine.has_work
    num_launched = len(graph.shapes)
    _same(llm.generate(REQUESTS[2:4]), expected.generate(REQUESTS[2:4]))
    assert len(graph.shapes) > num_launched


def test_prefix_blocks_are_named_as_in_the_eager_path(agreeing: World) -> None:
    llm, _ = make_llm(agreeing, proposer="eagle3", num_speculative_tokens=3)
    eager, _ = make_llm(agreeing, is_eager=True, proposer="eagle3", num_speculative_tokens=3)
    first = replace(REQUESTS[2], max_tokens=40)
    for one in (llm, eager):
        (answer,) = one.generate([first])
        follow = (*first.prompt_ids_target, *answer.ids_target, *prompt_of(5, 3))
        second = replace(first, request_id="second", prompt_ids_target=follow)
        (answer,) = one.generate([second])
        if one is llm:
            found = answer
    assert found.usage == answer.usage
    assert found.usage.num_cached_tokens > len(first.prompt_ids_target)
    assert found.ids_target == answer.ids_target


def test_nothing_runs_ahead_when_told_so(agreeing: World) -> None:
    llm, graphs = make_llm(agreeing, proposer="eagle3", num_speculative_tokens=3, graphs="off")
    llm.generate(REQUESTS[:2])
    assert graphs == []
    assert llm.engine.stats().num_device_rounds == 0


def test_an_unknown_mode_is_refused(agreeing: World) -> None:
    with pytest.raises(DiagnosticError) as caught:
        resolve_config(agreeing.manifest, Overrides(device="cpu", graphs="on"))
    assert [(item.code, item.where) for item in caught.value.diagnostics] == [("SD832", "--graphs")]
