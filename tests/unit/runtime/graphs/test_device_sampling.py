"""Rounds on the device draw the eager path's tokens: alone, mixed, with and without filters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.engine.slot_params import round_kind, slot_sampling
from runtime.graphs.slot_sampling import GREEDY, SamplingState
from runtime.kernels.draw import draw_tokens, of_rows
from runtime.kernels.noise import TOKEN_DRAW
from runtime.spec.noise import noise_rows
from runtime.spec.sampling import TokenCounts, noise_key, process_logits
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, prompt_of
from tests.fake_graph import FakeGraph, ids_of, make_llm
from tests.tiny_manifest import CPU
from tests.unit.runtime.spec.stub_model import choose_with, gumbel

KINDS = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=0.8, seed=5),
    "cold": SamplingParams(temperature=1e-300, seed=6),
    "hot": SamplingParams(temperature=1e300, seed=2**62 + 3, choice_index=4),
    "top-k": SamplingParams(temperature=1.1, top_k=7, seed=-1),
    "top-p": SamplingParams(temperature=1.3, top_p=0.7, seed=8),
    "min-p": SamplingParams(temperature=0.9, min_p=0.05, seed=9),
    "all": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=10),
}
GENERAL = {
    "penalty": SamplingParams(temperature=0.8, presence_penalty=0.4, seed=3),
    "bias": SamplingParams(temperature=0.8, logit_bias=((3, 1.0),), seed=3),
    "min-tokens": SamplingParams(temperature=0.8, min_tokens=2, seed=3),
    "greedy bias": SamplingParams(logit_bias=((3, 1.0),)),
    "logprobs": SamplingParams(num_logprobs=0),
}


def requests(*kinds: str, max_tokens: int = 20) -> list[RequestInput]:
    return [
        RequestInput(
            request_id=f"{index} {kind}",
            prompt_ids_target=prompt_of(60 + index, 4 + 3 * index),
            params=(KINDS | GENERAL)[kind],
            max_tokens=max_tokens,
            ignore_eos=True,
            num_speculative_tokens=3 - index % 2,
        )
        for index, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("num_ids", [3, 8, 1001])
def test_rows_have_the_bits_of_requests_one_by_one(num_ids: int) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    params = list(KINDS.values())
    logits = torch.randn(24, num_ids, generator=generator) * 4
    logits = (logits * 4).round() / 4  # ties are common
    request = torch.randint(0, len(params), (24,), generator=generator, dtype=torch.int32)
    position = torch.arange(100, 124)
    state = SamplingState(len(params) + 1, CPU)
    state.write(range(len(params)), [slot_sampling(item) for item in params])
    sampling = state.select(torch.arange(len(params)), has_filters=True)
    found = draw_tokens(logits, sampling, request, position - 1, TOKEN_DRAW).tolist()
    for row, (which, place) in enumerate(zip(request.tolist(), position.tolist(), strict=True)):
        item = params[which]
        processed = process_logits(logits[row], item, TokenCounts(num_output=0))
        noise = None if item.is_greedy else gumbel(noise_key(item, place), num_ids=num_ids)
        assert found[row] == int(choose_with(processed, noise)), KINDS


def test_seeds_of_slots_are_those_of_the_host() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 - 1]
    params = [SamplingParams(temperature=1.0, seed=seed, choice_index=3) for seed in seeds]
    state = SamplingState(9, CPU)
    state.write(range(7), [slot_sampling(item) for item in params])
    found = of_rows(state.select(torch.arange(7), has_filters=False), None)
    wanted = noise_rows([noise_key(item, 0) for item in params], device=CPU)
    assert torch.equal(found.seed_low_S, wanted.seed_low_M)
    assert torch.equal(found.seed_high_S, wanted.seed_high_M)
    assert torch.equal(found.choice_index_S, wanted.choice_index_M)
    padding = of_rows(state.select(torch.tensor([8]), has_filters=True), None)
    assert not bool(padding.is_sampled_S[0])
    assert float(padding.temperature_S[0]) == 1.0


def test_which_rounds_run_which_requests() -> None:
    assert round_kind([]) is None
    assert round_kind([KINDS["greedy"]]) == "greedy"
    assert round_kind([KINDS["greedy"], KINDS["drawn"], KINDS["hot"]]) == "sampled"
    for name in ("top-k", "top-p", "min-p", "all"):
        assert round_kind([KINDS["drawn"], KINDS[name], KINDS["greedy"]]) == "filtered"
    for params in GENERAL.values():
        assert round_kind([KINDS["greedy"], params]) is None


def both(world: World, asked: list[RequestInput], **overrides: Any) -> tuple[LLM, FakeGraph]:
    """Run requests eagerly without a draft and ahead with one; they must be equal."""
    settings: dict[str, Any] = {"proposer": "eagle3", "num_speculative_tokens": 3, **overrides}
    plain, _ = make_llm(world, is_eager=True, proposer="none")
    eager, _ = make_llm(world, is_eager=True, **settings)
    ahead, (graph,) = make_llm(world, **settings)
    expected = eager.generate(asked)
    found = ahead.generate(asked)
    without = plain.generate([replace(item, num_speculative_tokens=None) for item in asked])
    assert ids_of(found) == ids_of(expected) == ids_of(without)
    for one, other in zip(found, expected, strict=True):
        assert one.usage.num_accepted_drafts == other.usage.num_accepted_drafts
        assert one.usage.num_rounds == other.usage.num_rounds
    return ahead, graph


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("drawn", "hot", "greedy"), "sampled"),
        (("top-k", "greedy", "top-p", "cold"), "filtered"),
        (("all", "min-p"), "filtered"),
        (("greedy", "greedy"), "greedy"),
    ],
)
def test_sequences_equal_eager_and_target_only_ones(
    agreeing: World, kinds: tuple[str, ...], expected: str
) -> None:
    llm, graph = both(agreeing, requests(*kinds))
    assert graph.shapes[0].kind == expected  # fewer run later on
    stats = llm.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert {shape.context for shape in graph.shapes if shape.kind != "greedy"} <= {
        graph.contexts[-1]
    }


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_requests_of_other_kinds_come_and_go(agreeing: World, proposer: str) -> None:
    """Kinds of rounds change with who runs; a slot forgets the options of the request before."""
    gamma = 3 if proposer == "eagle3" else 0
    settings: dict[str, Any] = {
        "proposer": proposer,
        "num_speculative_tokens": gamma,
        "max_num_requests": 2,
    }
    kinds = ("all", "greedy", "drawn", "penalty", "top-p", "hot", "greedy", "greedy")
    asked = [
        replace(item, max_tokens=5 + 3 * (index % 3), num_speculative_tokens=None)
        for index, item in enumerate(requests(*kinds))
    ]
    plain, _ = make_llm(agreeing, is_eager=True, proposer="none")
    ahead, (graph,) = make_llm(agreeing, **settings)
    assert ids_of(ahead.generate(asked)) == ids_of(plain.generate(asked))
    assert len({shape.kind for shape in graph.shapes}) == 3


@pytest.mark.parametrize("kind", sorted(GENERAL))
def test_other_options_take_the_eager_path(agreeing: World, kind: str) -> None:
    llm, (graph,) = make_llm(agreeing, proposer="eagle3", num_speculative_tokens=3)
    llm.generate(requests(kind, max_tokens=6))
    assert graph.shapes == []


@pytest.mark.parametrize("kinds", [("all", "greedy", "drawn"), ("top-p", "hot", "cold", "drawn")])
def test_rejection_rounds_equal_eager_ones(agreeing: World, kinds: tuple[str, ...]) -> None:
    """Same acceptances, same tokens: laws are made inside each round, and nothing is left over."""
    settings: dict[str, Any] = {
        "proposer": "eagle3",
        "num_speculative_tokens": 3,
        "verification": "rejection",
    }
    asked = requests(*kinds)
    eager, _ = make_llm(agreeing, is_eager=True, **settings)
    ahead, (graph,) = make_llm(agreeing, **settings)
    found, expected = ahead.generate(asked), eager.generate(asked)
    assert ids_of(found) == ids_of(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.usage.num_accepted_drafts == other.usage.num_accepted_drafts
    assert graph.shapes[0].kind == "rejection"
    assert sum(item.usage.num_accepted_drafts for item in found) > 0


def test_slots_that_stay_as_they_are_cost_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SamplingState(4, CPU)
    drawn = slot_sampling(SamplingParams(temperature=0.5, seed=7, top_k=3))
    state.write([0, 2], [drawn, GREEDY])
    written: list[list[int]] = []
    tensor = torch.tensor

    def noted(values: list[float], **kinds: torch.dtype) -> torch.Tensor:
        written.append(list(values))
        return tensor(values, **kinds)

    monkeypatch.setattr(torch, "tensor", noted)
    state.write([2, 0], [GREEDY, drawn])
    assert written == []
    state.write([0, 1, 2], [GREEDY, drawn, GREEDY])
    assert written[0] == [0, 1], "a slot that was drawn from is greedy again"
    monkeypatch.undo()
    found = of_rows(state.select(torch.arange(4), has_filters=True), None)
    assert found.is_sampled_S.tolist() == [False, True, False, False]
    assert found.temperature_S.tolist() == [1.0, 0.5, 1.0, 1.0]
    assert found.top_k_S[1] == 3
    assert found.top_k_S[0] == found.top_k_S[3]
