"""For any model, any drafts and any batch, rounds commit what target-only decoding commits."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.spec.types import SamplingParams
from tests.unit.runtime.spec.stub_model import (
    advance,
    hash_model,
    make_view,
    run_round,
    target_only,
)

NUM_TOKENS = 7


@dataclass(frozen=True)
class Case:
    """One request and the drafts of its rounds: a right prefix, then arbitrary ids."""

    prompt: tuple[int, ...]
    params: SamplingParams
    rounds: tuple[tuple[int, tuple[int, ...]], ...]


@st.composite
def params(draw: st.DrawFn, num_ids: int) -> SamplingParams:
    ids = st.integers(0, num_ids - 1)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.integers(0, num_ids)),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice_index=draw(st.integers(0, 3)),
        logit_bias=tuple(
            draw(st.dictionaries(ids, st.floats(-3, 3, width=16), max_size=2)).items()
        ),
        min_tokens=draw(st.integers(0, 3)),
        end_ids_target=tuple(draw(st.sets(ids, max_size=min(2, num_ids - 1)))),
    )


@st.composite
def cases(draw: st.DrawFn, num_ids: int) -> Case:
    ids = st.integers(0, num_ids - 1)
    one_round = st.tuples(st.integers(0, 4), st.lists(ids, max_size=3).map(tuple))
    return Case(
        prompt=tuple(draw(st.lists(ids, min_size=1, max_size=4))),
        params=draw(params(num_ids)),
        rounds=tuple(draw(st.lists(one_round, min_size=NUM_TOKENS, max_size=NUM_TOKENS))),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_ids=st.integers(2, 8), model_seed=st.integers(0, 1000))
def test_rounds_equal_target_only(data: st.DataObject, num_ids: int, model_seed: int) -> None:
    model = hash_model(model_seed, num_ids)
    requests = data.draw(st.lists(cases(num_ids), min_size=1, max_size=3))
    answers = [target_only(model, r.prompt, r.params, NUM_TOKENS + 8) for r in requests]
    views = [
        make_view(r.prompt, r.params, num_prompt_tokens=len(r.prompt), slot=i)
        for i, r in enumerate(requests)
    ]
    for round_index in range(NUM_TOKENS):
        drafts = []
        for request, answer, view in zip(requests, answers, views, strict=True):
            done = min(len(view.ids_target) - len(request.prompt), NUM_TOKENS)
            num_right, rest = request.rounds[round_index]
            drafts.append((*answer[done : done + num_right], *rest)[:7])
        result = run_round(model, views, drafts, num_rows_before=round_index % 2)
        assert result.num_drafts == tuple(len(d) for d in drafts)
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            done = len(views[i].ids_target) - len(request.prompt)
            committed = result.committed[i]
            assert len(committed) == result.num_accepted_drafts[i] + 1
            if done < NUM_TOKENS:
                assert committed == answer[done : done + len(committed)]
                views[i] = advance(views[i], committed)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_ids=st.integers(2, 8), model_seed=st.integers(0, 1000))
def test_a_request_does_not_feel_its_batch(
    data: st.DataObject, num_ids: int, model_seed: int
) -> None:
    model = hash_model(model_seed, num_ids)
    requests = data.draw(st.lists(cases(num_ids), min_size=2, max_size=4))
    views = [
        make_view(r.prompt, r.params, num_prompt_tokens=len(r.prompt), slot=i)
        for i, r in enumerate(requests)
    ]
    drafts = [request.rounds[0][1] for request in requests]
    together = run_round(model, views, drafts, num_rows_before=1)
    order = data.draw(st.permutations(range(len(views))))
    shuffled = run_round(model, [views[i] for i in order], [drafts[i] for i in order], width=5)
    for place, i in enumerate(order):
        alone = run_round(model, [views[i]], [drafts[i]])
        assert together.committed[i] == alone.committed[0] == shuffled.committed[place]
