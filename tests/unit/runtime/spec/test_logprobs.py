"""Log probabilities: the softmax of raw logits, the same bits in any batch, ties by id."""

from __future__ import annotations

import math

import torch

from runtime.server.options import MAX_LOGPROBS as HTTP_MAX_LOGPROBS
from runtime.spec.logprobs import LEAST_LOGPROB, log_probabilities, token_logprobs
from runtime.spec.types import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from tests.unit.runtime.spec.stub_model import advance, hash_model, make_view, run_round

PROMPT = (3, 1, 4)


def test_they_are_the_log_softmax() -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)) * 6
    expected = torch.log_softmax(logits.double(), dim=1)
    torch.testing.assert_close(log_probabilities(logits), expected, rtol=0, atol=1e-9)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(40, 1001, generator=torch.Generator().manual_seed(2)) * 5
    whole = log_probabilities(logits)
    for start, stop in ((0, 1), (7, 8), (3, 20), (39, 40)):
        assert torch.equal(log_probabilities(logits[start:stop].clone()), whole[start:stop])


def test_the_likeliest_are_ranked_by_value_then_id_and_infinities_are_clamped() -> None:
    logits = torch.tensor([[1.0, 2.0, -math.inf, 2.0]])
    (entry,) = token_logprobs(logits, torch.tensor([0]), 9)
    assert [item for item, _ in entry.top] == [1, 3, 0, 2]
    assert entry.top[0][1] == entry.top[1][1]
    assert entry.top[2][1] == entry.logprob
    assert entry.top[3][1] == LEAST_LOGPROB


def test_rounds_report_the_committed_tokens_only_and_options_do_not_change_them() -> None:
    model = hash_model(5, 8, step=0.01)
    kinds = [
        SamplingParams(num_logprobs=2),
        SamplingParams(temperature=0.7, top_k=3, seed=4, num_logprobs=0),
        SamplingParams(presence_penalty=1.0, logit_bias=((2, 3.0),), num_logprobs=1),
        SamplingParams(temperature=1.2, seed=9, verification="rejection", num_logprobs=8),
        SamplingParams(),
    ]
    views = [make_view(PROMPT, params, num_prompt_tokens=3) for params in kinds]
    result = run_round(model, views, [(1, 2), (3,), (), (0, 0), (5, 5)])
    for view, committed, entries in zip(views, result.committed, result.logprobs, strict=True):
        if view.params.num_logprobs is None:
            assert entries == ()
            continue
        assert len(entries) == len(committed)
        for token, entry in zip(committed, entries, strict=True):
            expected = torch.log_softmax(model(tuple(view.ids_target)).double(), dim=0).tolist()
            assert abs(entry.logprob - expected[token]) < 1e-9
            assert len(entry.top) == view.params.num_logprobs
            assert all(abs(value - expected[item]) < 1e-9 for item, value in entry.top)
            view = advance(view, [token])


def test_with_and_without_drafts_they_are_the_same_bits() -> None:
    model = hash_model(6, 8, step=0.001)
    params = SamplingParams(temperature=0.9, seed=2, num_logprobs=3)
    plain: list[TokenLogprobs] = []
    view = make_view(PROMPT, params, num_prompt_tokens=3)
    while len(plain) < 12:
        result = run_round(model, [view], [()])
        plain += result.logprobs[0]
        view = advance(view, result.committed[0])
    answer = view.ids_target[3:]
    found: list[TokenLogprobs] = []
    view = make_view(PROMPT, params, num_prompt_tokens=3)
    while len(found) < 12:
        done = len(view.ids_target) - 3
        result = run_round(model, [view], [answer[done : done + 3]])
        found += result.logprobs[0]
        view = advance(view, result.committed[0])
    assert found[:12] == plain[:12]


def test_one_limit_for_both_doors() -> None:
    assert HTTP_MAX_LOGPROBS == MAX_LOGPROBS
