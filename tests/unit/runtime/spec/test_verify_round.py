"""A round commits what target-only decoding would have, and counts its drafts right."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.spec.oracle import other_id
from runtime.spec.types import SamplingParams
from tests.unit.runtime.spec.stub_model import (
    Model,
    advance,
    hash_model,
    make_view,
    run_round,
    target_only,
)

PROMPT = (3, 1, 4)
NUM_IDS = 8
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=1234)
PENALISED = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    min_tokens=3,
    end_ids_target=(2,),
    logit_bias=((5, 1.0),),
)


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, PENALISED])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 5])
def test_every_acceptance_count(params: SamplingParams, num_drafts: int) -> None:
    model = hash_model(1, NUM_IDS)
    answer = target_only(model, PROMPT, params, num_drafts + 1)
    for count in range(num_drafts + 1):
        drafts = list(answer[:num_drafts])
        if count < num_drafts:
            drafts[count] = other_id(drafts[count])
        view = make_view(PROMPT, params, num_prompt_tokens=3)
        result = run_round(model, [view], [drafts])
        assert result.num_accepted_drafts == (count,)
        assert result.num_drafts == (num_drafts,)
        assert result.committed == (answer[: count + 1],)


def test_a_wrong_draft_hides_the_right_ones_after_it() -> None:
    model = hash_model(2, NUM_IDS)
    answer = target_only(model, PROMPT, SamplingParams(), 4)
    drafts = [answer[0], other_id(answer[1]), answer[2], answer[3]]
    # The model sees the wrong draft, so nothing after it may count even if it happens to agree.
    view = make_view(PROMPT, SamplingParams(), num_prompt_tokens=3)
    assert run_round(model, [view], [drafts]).num_accepted_drafts == (1,)


def test_zeros_beyond_the_drafts_are_not_accepted() -> None:
    """A model that always answers 0 must not accept the zeros that pad a narrow proposal."""
    view = make_view(PROMPT, SamplingParams(), num_prompt_tokens=3)
    result = run_round(lambda ids: torch.tensor([1.0, 0.0]), [view, view], [[0], [0, 0]], width=4)
    assert result.committed == ((0, 0), (0, 0, 0))
    assert result.num_accepted_drafts == (1, 2)


def test_greedy_ties_are_the_same_in_plain_and_processed_rows() -> None:
    def flat(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.0, 2.0, 2.0, 2.0])

    plain = make_view(PROMPT, SamplingParams(), num_prompt_tokens=3)
    # min_tokens without end ids changes no logit but leaves the fast path.
    slow = make_view(PROMPT, SamplingParams(min_tokens=1), num_prompt_tokens=3)
    assert run_round(flat, [plain], [[1]]).committed == ((1, 1),)
    assert run_round(flat, [slow], [[1]]).committed == ((1, 1),)
    assert run_round(flat, [plain, slow], [[1], [1]]).committed == ((1, 1), (1, 1))


def speculate(
    model: Model, prompt: tuple[int, ...], params: SamplingParams, num_tokens: int, gamma: int
) -> tuple[int, ...]:
    """Decode in rounds whose drafts are right, wrong, right, ... in turn."""
    answer = target_only(model, prompt, params, num_tokens + gamma + 1)
    view = make_view(prompt, params, num_prompt_tokens=len(prompt))
    round_index = 0
    while len(view.ids_target) - len(prompt) < num_tokens:
        done = len(view.ids_target) - len(prompt)
        drafts = list(answer[done : done + gamma])
        wrong = round_index % (gamma + 1)
        if wrong < gamma:
            drafts[wrong] = other_id(drafts[wrong])
        view = advance(view, run_round(model, [view], [drafts]).committed[0])
        round_index += 1
    return tuple(view.ids_target[len(prompt) :][:num_tokens])


def test_penalties_apply_inside_a_block() -> None:
    """C089: a model that repeats token 5 for ever, drafts that repeat it too."""

    def repeats(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.0, 0.5, 0.1, 0.2, 0.3, 1.5, 0.4, 0.6])

    params = SamplingParams(presence_penalty=2.0)
    expected = target_only(repeats, PROMPT, params, 8)
    assert expected != (5,) * 8
    assert target_only(repeats, PROMPT, SamplingParams(), 8) == (5,) * 8
    view = make_view(PROMPT, params, num_prompt_tokens=3)
    while len(view.ids_target) < 3 + 8:
        result = run_round(repeats, [view], [[5, 5, 5]])
        view = advance(view, result.committed[0])
    assert tuple(view.ids_target[3 : 3 + 8]) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=2.0),
        SamplingParams(frequency_penalty=0.9),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=-1.0, frequency_penalty=0.3, temperature=0.9, seed=77),
        PENALISED,
    ],
)
@pytest.mark.parametrize("gamma", [1, 3, 4])
def test_penalised_blocks_equal_single_steps(params: SamplingParams, gamma: int) -> None:
    model = hash_model(4, NUM_IDS)
    expected = target_only(model, PROMPT, params, 24)
    assert speculate(model, PROMPT, params, 24, gamma) == expected


def test_min_tokens_ends_inside_a_block() -> None:
    def wants_to_end(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 9.0])

    params = SamplingParams(min_tokens=2, end_ids_target=(2,))
    view = make_view(PROMPT, params, num_prompt_tokens=3)
    assert run_round(wants_to_end, [view], [[1, 1, 2]]).committed == ((1, 1, 2, 2),)
    assert target_only(wants_to_end, PROMPT, params, 3) == (1, 1, 2)


def test_seeds_decide_alone() -> None:
    """C095: same seed, same tokens: alone, beside others, at another slot; seeds differ."""
    model = hash_model(6, NUM_IDS, step=0.01)

    def params(seed: int, choice_index: int = 0) -> SamplingParams:
        return SamplingParams(temperature=1.2, seed=seed, choice_index=choice_index)

    solo = {seed: target_only(model, PROMPT, params(seed), 12) for seed in range(7)}
    assert len(set(solo.values())) == 7
    views = [
        make_view(PROMPT, params(seed), num_prompt_tokens=3, slot=90 - i, request_id=f"q{i}")
        for i, seed in enumerate([42 % 7, 3, 0, 1, 2, 3, 4, 5, 6])
    ]
    for _ in range(12):
        committed = run_round(model, views, [()] * len(views), num_rows_before=2).committed
        views = [advance(view, ids) for view, ids in zip(views, committed, strict=True)]
    for view in views:
        assert tuple(view.ids_target[3:]) == solo[view.params.seed]
    choices = {target_only(model, PROMPT, params(5, index), 12) for index in range(4)}
    assert len(choices) == 4


@pytest.mark.parametrize("rows_per_pass", [1, 3, 64])
def test_requests_of_all_kinds_share_a_batch(
    rows_per_pass: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.spec.verify._ROWS_PER_PASS", rows_per_pass)
    model = hash_model(9, NUM_IDS)
    kinds = [SamplingParams(), SAMPLED, PENALISED, SamplingParams(temperature=0.4, top_k=3, seed=8)]
    answers = [target_only(model, PROMPT, params, 4) for params in kinds]
    for order in itertools.permutations(range(4)):
        views = [make_view(PROMPT, kinds[k], num_prompt_tokens=3) for k in order]
        drafts = [answers[k][:n] for k, n in zip(order, (3, 0, 2, 1), strict=True)]
        result = run_round(model, views, drafts, num_rows_before=3)
        assert result.num_accepted_drafts == (3, 0, 2, 1)
        assert result.committed == tuple(
            answers[k][: n + 1] for k, n in zip(order, (3, 0, 2, 1), strict=True)
        )


def test_counts_for_the_accept_length() -> None:
    """C033: 0, 1, 2 and 3 accepted drafts make an accept length of 2.5 and .75 .5 .25."""
    model = hash_model(10, NUM_IDS)
    answer = target_only(model, PROMPT, SamplingParams(), 16)
    view = make_view(PROMPT, SamplingParams(), num_prompt_tokens=3)
    accepted = []
    for count in range(4):
        done = len(view.ids_target) - 3
        drafts = list(answer[done : done + 3])
        if count < 3:
            drafts[count] = other_id(drafts[count])
        result = run_round(model, [view], [drafts])
        accepted.append(result.num_accepted_drafts[0])
        view = advance(view, result.committed[0])
    assert 1 + sum(accepted) / len(accepted) == 2.5
    assert [sum(a > j for a in accepted) / 4 for j in range(3)] == [0.75, 0.5, 0.25]


def test_a_round_of_no_requests() -> None:
    result = run_round(hash_model(1, 4), [], [], num_rows_before=1)
    assert result.committed == ()
