"""Speculation changes no token: every proposer, width and batch against target-only decoding."""

from __future__ import annotations

import pytest

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, drive, make_rig, prompt_of, reference_ids

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=12),
    SamplingParams(presence_penalty=1.5, repetition_penalty=1.3),
    SamplingParams(temperature=1.3, min_p=0.05, frequency_penalty=0.8, seed=13),
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=11, logit_bias=((40, 3.0), (41, -5.0))),
    SamplingParams(min_tokens=6, temperature=1.0, seed=14),
)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 4 * index),
        params=params,
        max_tokens=18 + index,
    )
    for index, params in enumerate(PARAMS)
)


@pytest.fixture(scope="session")
def expected(world: World) -> dict[str, tuple[int, ...]]:
    return {request.request_id: reference_ids(world, request) for request in REQUESTS}


def _script(expected: dict[str, tuple[int, ...]], **options: tuple[float, ...]) -> OracleScript:
    return OracleScript(continuations=dict(expected), **options)


@pytest.mark.parametrize(
    ("proposer", "gamma"),
    [
        *(("eagle3", gamma) for gamma in range(1, 9)),
        *(("oracle", gamma) for gamma in range(1, 9)),
        *(("ngram", gamma) for gamma in (1, 4, 8)),
    ],
)
def test_speculation_equals_target_only_decoding(
    world: World, expected: dict[str, tuple[int, ...]], proposer: str, gamma: int
) -> None:
    rig = make_rig(
        world,
        Overrides(proposer=proposer, num_speculative_tokens=gamma, max_num_requests=gamma),
        script=_script(expected, corruption_rates=(0.2, 0.4)),
    )
    answers = drive(rig, REQUESTS, arrivals={index: 2 * index for index in range(len(REQUESTS))})
    assert {name: answer.ids_target for name, answer in answers.items()} == expected
    stats = rig.engine.stats()
    assert stats.num_drafts > 0
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def test_target_only_engine_equals_the_reference(
    world: World, expected: dict[str, tuple[int, ...]]
) -> None:
    rig = make_rig(world, Overrides(proposer="none", max_num_requests=8))
    answers = drive(rig, REQUESTS)
    assert {name: answer.ids_target for name, answer in answers.items()} == expected
    assert rig.engine.stats().accept_length == 1.0


@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8])
def test_every_acceptance_count_is_forced_and_counted(
    world: World, expected: dict[str, tuple[int, ...]], gamma: int
) -> None:
    counts = tuple(range(gamma + 1))
    rig = make_rig(
        world,
        Overrides(proposer="oracle", num_speculative_tokens=gamma, max_num_requests=1),
        script=_script(expected, accept_counts=counts),
    )
    request = REQUESTS[5]
    wanted = expected[request.request_id]
    answer = drive(rig, [request])[request.request_id]
    assert answer.ids_target == wanted
    accepted = []
    num_tokens = 1  # the token that the prefill yields
    while num_tokens < len(wanted):
        # The script has no drafts beyond the end of the answer.
        num_drafts = min(gamma, len(wanted) - num_tokens)
        accepted.append(min(counts[len(accepted) % len(counts)], num_drafts))
        num_tokens += accepted[-1] + 1
    assert answer.usage.num_rounds == len(accepted)
    assert answer.usage.num_accepted_drafts == sum(accepted)
    stats = rig.engine.stats()
    assert stats.num_accepted_at == tuple(
        sum(count > position for count in accepted) for position in range(gamma)
    )
    assert stats.accept_length == 1 + sum(accepted) / len(accepted)
    assert answer.usage.accept_length == stats.accept_length


def test_a_request_may_ask_for_fewer_drafts(
    world: World, expected: dict[str, tuple[int, ...]]
) -> None:
    rig = make_rig(
        world,
        Overrides(proposer="oracle", num_speculative_tokens=4),
        script=_script(expected),
    )
    requests = [
        RequestInput(
            request_id=request.request_id,
            prompt_ids_target=request.prompt_ids_target,
            params=request.params,
            max_tokens=request.max_tokens,
            num_speculative_tokens=index,
        )
        for index, request in enumerate(REQUESTS[:4])
    ]
    answers = drive(rig, requests)
    for index, request in enumerate(requests):
        answer = answers[request.request_id]
        assert answer.ids_target == expected[request.request_id]
        assert answer.usage.num_drafts <= index * answer.usage.num_rounds
        assert (answer.usage.num_drafts == 0) == (index == 0)


def test_rounds_are_counted_by_shape(world: World, expected: dict[str, tuple[int, ...]]) -> None:
    rig = make_rig(
        world,
        Overrides(proposer="eagle3", num_speculative_tokens=3, batch_buckets=(1, 4)),
    )
    drive(rig, REQUESTS[:3])
    rounds = rig.engine.stats().rounds_by_key
    assert {key.batch_bucket for key in rounds} <= {1, 4}
    assert {key.draft_width for key in rounds if key.num_speculative_tokens} == {1}
    assert all(key.verify_width == key.num_speculative_tokens + 1 for key in rounds)
    assert sum(rounds.values()) < rig.engine.stats().num_rounds
