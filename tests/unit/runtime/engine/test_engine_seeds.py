"""Seeds (C095): the same seed gives the same tokens, alone or in company, in any slot, any time."""

from __future__ import annotations

from dataclasses import replace

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, drive, make_rig, prompt_of

SEEDED = RequestInput(
    request_id="a",
    prompt_ids_target=prompt_of(5, 7),
    params=SamplingParams(temperature=1.0, seed=42),
    max_tokens=12,
    ignore_eos=True,
)


def _others(count: int) -> list[RequestInput]:
    return [
        replace(
            SEEDED,
            request_id=f"other{index}",
            prompt_ids_target=prompt_of(100 + index, 3 + index % 5),
            params=SamplingParams(temperature=1.0, seed=index),
            max_tokens=2 + index % 7,
        )
        for index in range(count)
    ]


def test_a_seed_fixes_the_answer(world: World) -> None:
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=2))
    alone = [drive(rig, [SEEDED])["a"].ids_target for _ in range(2)]
    twice = drive(rig, [SEEDED, replace(SEEDED, request_id="b")])
    crowd = drive(rig, [*_others(6), SEEDED], arrivals={6: 3})
    assert {*alone, *(answer.ids_target for answer in twice.values())} == {crowd["a"].ids_target}
    drive(rig, _others(20))
    assert drive(rig, [SEEDED])["a"].ids_target == alone[0]


def test_different_seeds_in_one_batch_equal_their_solo_runs(world: World) -> None:
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=2))
    requests = [
        replace(SEEDED, request_id=str(seed), params=replace(SEEDED.params, seed=seed))
        for seed in range(4)
    ]
    together = drive(rig, requests)
    assert len({answer.ids_target for answer in together.values()}) > 1
    for request in requests:
        solo = drive(rig, [request])[request.request_id]
        assert solo.ids_target == together[request.request_id].ids_target


def test_a_temperature_next_to_zero_yields_the_greedy_tokens(world: World) -> None:
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=2))
    greedy = replace(SEEDED, request_id="greedy", params=SamplingParams())
    cold = replace(SEEDED, params=replace(SEEDED.params, temperature=1e-300))
    answers = drive(rig, [greedy, cold])
    assert answers["a"].ids_target == answers["greedy"].ids_target


def test_a_missing_seed_is_drawn_and_reported(world: World) -> None:
    rig = make_rig(world, Overrides(proposer="none"))
    answers = set()
    for _ in range(8):
        admission = rig.engine.add_request(replace(SEEDED, has_seed=False))
        ids: list[int] = []
        while rig.engine.has_work:
            ids.extend(token for delta in rig.engine.step() for token in delta.ids_target)
        answers.add(tuple(ids))
        again = replace(SEEDED, params=replace(SEEDED.params, seed=admission.seed))
        assert drive(rig, [again])["a"].ids_target == tuple(ids)
    assert len(answers) > 1
