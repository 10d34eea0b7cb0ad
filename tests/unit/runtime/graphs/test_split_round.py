"""Requests with a grammar: split rounds yield constrained decoding, and nobody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.config import RuntimeConfig
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.graphs.round import DeviceRound
from runtime.graphs.split import split_kind
from runtime.graphs.state import RoundShape
from runtime.kernels.masks import num_mask_words, unpack_mask
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, prompt_of, reference_ids
from tests.fake_graph import FakeGraph, ids_of, make_llm
from tests.tiny import EOS_ID
from tests.tiny_grammar import (
    Grammar,
    Rule,
    Slow,
    dead_end,
    five_tens,
    pack_mask,
    parity,
    tens,
)

DRAWN = SamplingParams(temperature=0.9, seed=5)
FILTERED = SamplingParams(temperature=1.1, top_k=30, top_p=0.9, seed=-6)
EAGLE: dict[str, Any] = {"proposer": "eagle3", "num_speculative_tokens": 3}
MIXED: tuple[tuple[Rule | None, SamplingParams], ...] = (
    (parity, SamplingParams()),
    (None, SamplingParams()),
    (tens, DRAWN),
    (None, DRAWN),
    (parity, FILTERED),
    (five_tens, SamplingParams()),
    (None, FILTERED),
    (parity, DRAWN),
)


@pytest.fixture(scope="module")
def answers(agreeing: World) -> dict[str, tuple[int, ...]]:
    """Constrained decoding of the mixed requests, one row at a time, with no engine."""
    return {item.request_id: reference_ids(agreeing, item) for item in requests()}


def requests(
    kinds: Sequence[tuple[Rule | None, SamplingParams]] = MIXED, *, max_tokens: int = 10
) -> list[RequestInput]:
    return [
        RequestInput(
            request_id=f"{index} {rule.__name__ if rule else 'free'}",
            prompt_ids_target=prompt_of(40 + index, 3 + 4 * index),
            params=params,
            max_tokens=max_tokens + 2 * (index % 3),
            num_speculative_tokens=3 - index % 2,
            masks=None if rule is None else Grammar(rule),
        )
        for index, (rule, params) in enumerate(kinds)
    ]


def keep_to_their_grammars(asked: Sequence[RequestInput], found: Sequence[Completion]) -> None:
    for request, answer in zip(asked, found, strict=True):
        if isinstance(request.masks, Grammar):
            assert request.masks.accepts(answer.ids_target), request.request_id


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.finish_reason, one.error) == (
            (other.text, other.finish_reason, other.error)
        )
        assert structs.replace(one.usage, num_cached_tokens=0) == structs.replace(
            other.usage, num_cached_tokens=0
        )


def both(
    world: World, asked: Sequence[RequestInput], **overrides: Any
) -> tuple[LLM, FakeGraph, tuple[Completion, ...]]:
    """Run requests eagerly and in rounds on the device; answers and counts must be equal."""
    eager, _ = make_llm(world, is_eager=True, **overrides)
    ahead, (graph,) = make_llm(world, **overrides)
    expected, found = eager.generate(asked), ahead.generate(asked)
    same(found, expected)
    for name in ("num_rounds", "num_drafts", "num_accepted_at", "num_output_tokens", "finished"):
        assert getattr(ahead.engine.stats(), name) == getattr(eager.engine.stats(), name), name
    keep_to_their_grammars(asked, found)
    ahead.engine.check()
    assert ahead.engine.stats().num_free_kv_blocks == ahead.engine.stats().num_kv_blocks
    return ahead, graph, found


@pytest.mark.parametrize("max_num_requests", [3, 8])
def test_mixed_batches_equal_eager_and_reference(
    agreeing: World, answers: dict[str, tuple[int, ...]], max_num_requests: int
) -> None:
    asked = requests()
    llm, graph, found = both(agreeing, asked, max_num_requests=max_num_requests, **EAGLE)
    assert ids_of(found) == answers
    split = [shape for shape in graph.shapes if shape.is_split]
    whole = [shape for shape in graph.shapes if not shape.is_split]
    assert split
    assert whole
    assert {shape.kind for shape in split} <= {"sampled", "filtered"}
    stats = llm.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    ended = found[5]
    assert (ended.ids_target[-1], ended.finish_reason, len(ended.ids_target)) == (
        EOS_ID, "stop", 6
    )  # fmt: skip


@pytest.mark.parametrize(("proposer", "gamma"), [("none", 0), ("eagle3", 1)])
def test_other_draft_counts(agreeing: World, proposer: str, gamma: int) -> None:
    asked = [replace(item, num_speculative_tokens=None) for item in requests(MIXED[:5])]
    both(agreeing, asked, proposer=proposer, num_speculative_tokens=gamma)


def test_scripted_drafts(agreeing: World, answers: dict[str, tuple[int, ...]]) -> None:
    """Every count of accepted drafts occurs, with drafts that the grammar forbids among them."""
    asked = [
        replace(item, num_speculative_tokens=None, max_tokens=7) for item in requests(MIXED[:5])
    ]
    script = OracleScript(
        continuations={item.prompt_ids_target: answers[item.request_id] for item in asked},
        accept_counts=(3, 0, 1, 2),
    )
    llm, (graph,) = make_llm(agreeing, proposer="oracle", num_speculative_tokens=3, script=script)
    found = llm.generate(asked)
    assert ids_of(found) == {item.request_id: answers[item.request_id][:7] for item in asked}
    assert min(llm.engine.stats().num_accepted_at) > 0
    assert any(shape.is_split for shape in graph.shapes)


def test_rejection_mode(agreeing: World) -> None:
    """The laws of the drafts outlive the first half."""
    asked = requests(MIXED[:5])
    _, graph, found = both(agreeing, asked, verification="rejection", **EAGLE)
    assert {shape.kind for shape in graph.shapes if shape.is_split} == {"rejection"}
    assert sum(answer.usage.num_accepted_drafts for answer in found) > 0


def test_only_requests_with_a_grammar_run_split(agreeing: World) -> None:
    plain = [item for item in requests() if item.masks is None]
    _, graph, _ = both(agreeing, plain, **EAGLE)
    assert not any(shape.is_split for shape in graph.shapes)
    restricted = [item for item in requests() if item.masks is not None]
    _, graph, _ = both(agreeing, restricted, **EAGLE)
    assert all(shape.is_split for shape in graph.shapes)


def test_others_never_wait_for_masks(agreeing: World, answers: dict[str, tuple[int, ...]]) -> None:
    """A grammar that makes no mask until all others are done holds nobody else up."""
    slow = Slow(parity)
    asked = [item for item in requests() if item.masks is None]
    asked.append(replace(requests()[7], masks=slow))
    llm, _ = make_llm(agreeing, **EAGLE)
    ids: dict[str, list[int]] = {item.request_id: [] for item in asked}
    for item in asked:
        llm.engine.add_request(item)
    running = {item.request_id for item in asked}
    while running:
        for delta in llm.engine.step():
            ids[delta.request_id] += delta.ids_target
            if delta.finish_reason is not None:
                running.discard(delta.request_id)
        if running == {asked[-1].request_id}:
            slow.may_go.set()
    assert {name: tuple(row) for name, row in ids.items()} == {name: answers[name] for name in ids}


def test_a_grammar_that_leaves_nothing_ends_its_request_only(agreeing: World) -> None:
    asked = requests([*MIXED[:2], (dead_end, SamplingParams()), (dead_end, DRAWN), MIXED[4]])
    eager, _ = make_llm(agreeing, is_eager=True, **EAGLE)
    ahead, _ = make_llm(agreeing, **EAGLE)
    expected, found = eager.generate(asked), ahead.generate(asked)
    for one, other in zip(found, expected, strict=True):
        assert (one.finish_reason, one.error) == (other.finish_reason, other.error)
        assert one.ids_target == other.ids_target
    for answer in found[2:4]:
        assert answer.error is not None
        assert answer.error.code == "SD924"
        assert answer.error.where == f"request={answer.request_id}"
    assert [answer.error for answer in (*found[:2], found[4])] == [None] * 3
    ahead.engine.check()


@pytest.mark.parametrize(
    ("event", "num_steps"),
    [*(("abort", count) for count in (2, 3, 4, 5, 6)), ("preempt", 3), ("preempt", 5), ("late", 4)],
)
def test_leaving_and_joining_between_the_halves(
    agreeing: World, answers: dict[str, tuple[int, ...]], event: str, num_steps: int
) -> None:
    asked = requests()
    llm, _ = make_llm(agreeing, max_num_requests=4, **EAGLE)
    engine = llm.engine
    ids: dict[str, list[int]] = {item.request_id: [] for item in asked}
    for item in asked[:4]:
        engine.add_request(item)
    late, step = asked[4:], 0
    while engine.has_work or late:
        if step == num_steps:
            if event == "abort":
                assert engine.abort(asked[2].request_id)
                assert engine.abort(asked[1].request_id)
            elif event == "preempt":
                victim = engine.find(asked[2].request_id)
                if victim is not None and victim.placement is not None:
                    engine._scheduler.preempt(victim)
            while late:  # take over slots and blocks at once
                engine.add_request(late.pop())
        for delta in engine.step():
            ids[delta.request_id] += delta.ids_target
        engine.check()
        step += 1
    for name, found in ids.items():
        gone = event == "abort" and name in (asked[1].request_id, asked[2].request_id)
        assert answers[name][: len(found)] == tuple(found), name
        assert gone or len(found) == len(answers[name]), name


def test_lack_of_blocks_and_the_end_of_the_context(
    agreeing: World, answers: dict[str, tuple[int, ...]]
) -> None:
    asked = [replace(item, max_tokens=None, ignore_eos=True) for item in requests(MIXED[:4])]
    both(agreeing, asked, max_num_requests=4, max_model_len=32, **EAGLE)
    llm, _ = make_llm(agreeing, max_num_requests=6, num_kv_blocks=10, max_model_len=64, **EAGLE)
    assert ids_of(llm.generate(requests())) == answers
    # Alone, requests with a grammar wait for their masks: who is preempted is no matter of time.
    masked = [item for item in requests() if item.masks is not None]
    llm, _ = make_llm(agreeing, max_num_requests=6, num_kv_blocks=8, max_model_len=48, **EAGLE)
    found = ids_of(llm.generate(masked))
    assert found == {item.request_id: answers[item.request_id] for item in masked}
    assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("length_mode", ["compact", "cap-accept"])
def test_chosen_draft_counts(
    agreeing: World, answers: dict[str, tuple[int, ...]], length_mode: str
) -> None:
    llm, (graph,) = make_llm(agreeing, length_mode=length_mode, **EAGLE)
    assert ids_of(llm.generate(requests())) == answers
    assert {s.num_drafts for s in graph.shapes if s.is_split} == {graph.draft_counts[-1]}


class Spoilt(FakeGraph):
    """Shows the second half other masks than the host made."""

    def __init__(self, round_: DeviceRound, config: RuntimeConfig, *, how: str) -> None:
        super().__init__(round_, config)
        self.how = how

    def launch(self, shape: RoundShape, buffer: int) -> None:
        if shape.is_split:
            assert self.round.split is not None
            words = self.round.split.words_BWX
            if self.how == "dropped":
                words.fill_(-1)
            elif self.how == "a row late":
                words.copy_(words.roll(1, dims=1))
        super().launch(shape, buffer)


@pytest.mark.parametrize("how", ["kept", "dropped", "a row late"])
def test_negative_control(agreeing: World, how: str) -> None:
    """The tests above tell masks that are left out, or stand in a row too late, from right ones."""
    asked = requests([(parity, SamplingParams()), (parity, DRAWN)])
    llm, _ = make_llm(agreeing, make_runner=lambda r, c: Spoilt(r, c, how=how), **EAGLE)
    found = llm.generate(asked)
    is_equal = all(
        answer.ids_target == reference_ids(agreeing, request)
        for answer, request in zip(found, asked, strict=True)
    )
    assert is_equal == (how == "kept")


class Faulty(Grammar):
    """A grammar that breaks the protocol in its second round."""

    def fill(
        self, output_ids_target: Sequence[int], drafts_target: Sequence[int], words_WX: torch.Tensor
    ) -> None:
        if len(output_ids_target) > 2:
            raise RuntimeError("a fault of the grammar")
        super().fill(output_ids_target, drafts_target, words_WX)


def test_a_fault_of_a_provider_is_the_caller_s_and_ends_its_round(
    agreeing: World, answers: dict[str, tuple[int, ...]]
) -> None:
    llm, _ = make_llm(agreeing, **EAGLE)
    asked = requests()[:3]
    broken = replace(asked[0], request_id="broken", masks=Faulty(parity))
    with pytest.raises(RuntimeError, match="a fault of the grammar"):
        llm.generate([*asked[1:], broken])
    llm.engine.check()
    found = ids_of(llm.generate(asked))
    assert found == {item.request_id: answers[item.request_id] for item in asked}


def test_a_grammar_of_another_vocabulary_is_refused(agreeing: World) -> None:
    llm, _ = make_llm(agreeing, **EAGLE)
    wish = replace(requests()[0], masks=Grammar(parity, num_ids=50))
    with pytest.raises(DiagnosticError) as caught:
        llm.generate([wish])
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.where) == ("SD843", f"request={wish.request_id}")
    assert (problem.expected, problem.found) == ("104", "50")


def test_split_rounds_draw_where_greedy_ones_have_no_logits() -> None:
    assert [split_kind(kind) for kind in ("greedy", "sampled", "filtered", "rejection")] == [
        "sampled", "sampled", "filtered", "rejection"
    ]  # fmt: skip


def test_the_thread_that_makes_masks_ends_with_the_engine(agreeing: World) -> None:
    before = set(threading.enumerate())
    llm, _ = make_llm(agreeing, **EAGLE)
    llm.generate(requests(MIXED[:2], max_tokens=3))
    (maker,) = (
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("masks")
    )
    llm.close()
    maker.join(60)
    assert not maker.is_alive()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 130), st.integers(1, 4), st.randoms(use_true_random=False))
def test_masks_survive_packing(num_ids: int, num_rows: int, random: Any) -> None:
    allowed = torch.tensor(
        [[random.random() < 0.5 for _ in range(num_ids)] for _ in range(num_rows)]
    )
    words = pack_mask(allowed)
    assert words.dtype == torch.int32
    assert words.shape == (num_rows, num_mask_words(num_ids))
    assert torch.equal(unpack_mask(words, num_ids), allowed)
    full = torch.full_like(words, -1)
    assert unpack_mask(full, num_ids).all()
