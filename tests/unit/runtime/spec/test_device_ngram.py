"""Prompt lookup in rounds on the device: the drafts of the host, however the batch looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.batch import RoundRequests, RoundStates
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.kernels.ngram import append_history, find_drafts
from runtime.spec.factory import make_proposer
from runtime.spec.ngram import DeviceNgramProposer, NgramProposer, lookup
from runtime.spec.script_table import Room
from runtime.spec.types import DeviceProposer, SamplingParams
from tests.engine_harness import World, make_world, reference_ids
from tests.fake_graph import FakeGraph, ids_of, make_llm
from tests.tiny_grammar import Grammar, parity, tens
from tests.tiny_manifest import CPU

NGRAM: dict[str, Any] = {"proposer": "ngram", "num_speculative_tokens": 4}
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.3, seed=4),
    SamplingParams(temperature=0.7, top_k=3, seed=-9),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("ngram"))


def requests(num_requests: int, *, kinds: Sequence[SamplingParams] = KINDS) -> list[RequestInput]:
    """Return requests that repeat themselves, with a mask of few ids for most of them."""
    return [
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=tuple(20 + (index + step) % (2 + index) for step in range(6 + index)),
            params=kinds[index % len(kinds)],
            max_tokens=10 + 5 * (index % 3),
            ignore_eos=True,
            num_speculative_tokens=4 - index % 3,
        )
        for index in range(num_requests)
    ]


def equal(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert structs.replace(one.usage, num_cached_tokens=0) == structs.replace(
            other.usage, num_cached_tokens=0
        )


def both(world: World, asked: Sequence[RequestInput], **overrides: Any) -> tuple[LLM, FakeGraph]:
    """Run requests eagerly and ahead of the host; answers, drafts and acceptances are equal."""
    eager, _ = make_llm(world, is_eager=True, **NGRAM, **overrides)
    ahead, (graph,) = make_llm(world, **NGRAM, **overrides)
    expected, found = eager.generate(asked), ahead.generate(asked)
    equal(found, expected)
    assert ahead.engine.stats().num_accepted_at == eager.engine.stats().num_accepted_at
    assert ahead.engine.stats().num_drafts == eager.engine.stats().num_drafts
    ahead.engine.check()
    return ahead, graph


small_ids = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(small_ids, min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([torch.int32, torch.int64]),
    st.randoms(use_true_random=False),
)
def test_drafts_are_those_of_the_host(
    tokens: list[list[int]],
    num_drafts: int,
    max_ngram: int,
    num_padding: int,
    dtype: torch.dtype,
    random: Any,
) -> None:
    num_slots = len(tokens) + 3
    slots = random.sample(range(num_slots - 1), len(tokens)) + [num_slots - 1] * num_padding
    history = torch.tensor(
        [[random.randrange(4) for _ in range(41)] for _ in range(num_slots)], dtype=dtype
    )  # whatever an earlier tenant or a dropped draft left
    for slot, ids in zip(slots, tokens, strict=False):
        history[slot, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) - 1 for ids in tokens] + [0] * num_padding)
    found_S = torch.full((num_slots,), -1)
    drafts = find_drafts(
        history, torch.tensor(slots), lengths, found_S=found_S, num_drafts=num_drafts,
        max_ngram=max_ngram,
    ).tolist()  # fmt: skip
    for row, slot, ids in zip(drafts, slots, tokens, strict=False):
        wanted = lookup(ids, max_ngram=max_ngram, num_drafts=num_drafts)
        assert found_S[slot] == len(wanted)
        assert row == wanted + [0] * (num_drafts - len(wanted))
    assert drafts[len(tokens) :] == [[0] * num_drafts] * num_padding


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=8),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_what_is_appended_is_the_sequence(rounds: list[list[int]], accepted: list[int]) -> None:
    """Rows beyond the accepted ones are written, too, and written over by the next round."""
    history = torch.zeros((3, 12), dtype=torch.int32)
    history[1, 0] = 2
    ids = [2]
    for chosen, count in zip(rounds, accepted, strict=False):
        length = torch.tensor([len(ids) - 1, 0])
        append_history(history, torch.tensor([1, 2]), length, torch.tensor([chosen, [9, 9, 9]]))
        ids += chosen[: count + 1]
        known = min(len(ids), 12)
        assert history[1, :known].tolist() == ids[:known]
        assert not history[0].any()
        if len(ids) >= 12:
            break


def test_the_factory_gives_the_form_that_there_is_room_for() -> None:
    room = Room(num_slots=3, max_length=16, max_drafts=4)
    with_room = make_proposer("ngram", device=CPU, room=room)
    assert isinstance(with_room, DeviceNgramProposer)
    assert isinstance(with_room, DeviceProposer)
    assert isinstance(make_proposer("ngram", device=CPU), NgramProposer)


@pytest.mark.parametrize("max_num_requests", [1, 3, 6])
def test_rounds_ahead_equal_eager_ones(world: World, max_num_requests: int) -> None:
    asked = requests(6)
    llm, graph = both(world, asked, max_num_requests=max_num_requests)
    answers = llm.generate(asked)
    assert [answer.ids_target for answer in answers] == [reference_ids(world, i) for i in asked]
    stats = llm.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    assert stats.num_drafts < 3 * stats.num_rounds, "some rounds find fewer drafts than asked"
    assert {shape.num_drafts for shape in graph.shapes} == {4}


@pytest.mark.parametrize(
    "overrides",
    [
        {"length_mode": "compact", "max_num_requests": 3},
        {"verification": "rejection"},
        {"max_ngram": 1, "max_model_len": 40},
        {"num_kv_blocks": 9, "max_model_len": 40, "max_num_requests": 6, "prefill_buckets": ()},
    ],  # who lacks blocks follows the order of prefills, and with it the number of rounds
    ids=["packed", "rejection", "end of context", "lack of blocks"],
)
def test_other_rounds(world: World, overrides: dict[str, Any]) -> None:
    asked = requests(6)
    if overrides.get("length_mode") is None:
        llm, _ = both(world, asked, **overrides)
    else:  # the eager path chooses draft counts for another number of requests at times
        llm, _ = make_llm(world, **NGRAM, **overrides)
    found = llm.generate(asked)
    if "verification" not in overrides:
        assert [answer.ids_target for answer in found] == [reference_ids(world, i) for i in asked]
    assert llm.engine.stats().num_device_rounds > 0


def test_lookup_under_a_grammar(world: World) -> None:
    """A grammar is shown the places of drafts that there are not; none of them is committed."""
    asked = [
        replace(item, masks=None if index % 3 == 2 else Grammar((tens, parity)[index % 3]))
        for index, item in enumerate(requests(6))
    ]
    _, graph = both(world, asked)
    assert any(shape.is_split for shape in graph.shapes)
    assert not all(shape.is_split for shape in graph.shapes)


class Forgetful(DeviceNgramProposer):
    """Does not write down what rounds on the device commit."""

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        pass


def test_negative_control(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that is not appended changes drafts, though no answer."""
    asked = requests(3)
    eager, _ = make_llm(world, is_eager=True, **NGRAM)
    monkeypatch.setattr("runtime.spec.factory.DeviceNgramProposer", Forgetful)
    ahead, _ = make_llm(world, **NGRAM)
    expected, found = eager.generate(asked), ahead.generate(asked)
    assert ids_of(found) == ids_of(expected)
    with pytest.raises(AssertionError):
        equal(found, expected)
