"""Engines whose draft has a reduced head: the target-only text, with dynamic rows and without.

A map, and what is brought back beside it, may change how often a draft is right; never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.config import Overrides, resolve_config
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, drive, make_rig, prompt_of, reference_ids
from tests.fake_graph import ids_of, make_llm
from tests.tiny import EOS_ID, TOKENIZER_SIZE
from tests.tiny_last_state import Kind, last_state_world

KINDS: tuple[Kind, ...] = ("mtp", "eagle")
HALF = (EOS_ID, *range(TOKENIZER_SIZE - 1, 3, -2))  # every other id, in no ascending order
DYNAMIC = {
    "map": {},
    "own": {"dynamic_rows": 6},
    "rank": {"dynamic_rank": 4},
    "both": {"dynamic_rows": 30, "dynamic_rank": 8},
}
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(50 + index, 2 + 9 * index),
        max_tokens=28,
        ignore_eos=True,
        num_speculative_tokens=4 - index % 3,
    )
    for index in range(5)
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def half(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> World:
    return last_state_world(tmp_path_factory.mktemp("half"), kind, token_map=HALF)


@pytest.fixture(scope="module")
def whole(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> World:
    return last_state_world(tmp_path_factory.mktemp("whole"), kind)


def settings(world: World, **given: int) -> dict[str, object]:
    assert world.manifest.draft is not None
    return {
        "proposer": world.manifest.draft.algorithm,
        "num_speculative_tokens": 4,
        "max_num_requests": 3,
        **given,
    }


def accepted(answers: Sequence[Completion]) -> int:
    return sum(answer.usage.num_accepted_drafts for answer in answers)


def counts(llm: LLM) -> tuple[int, ...]:
    return llm.engine.stats().num_accepted_at


@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_the_text_is_the_targets_and_rounds_on_the_device_draft_alike(
    half: World, dynamic: str
) -> None:
    eager, _ = make_llm(half, is_eager=True, **settings(half, **DYNAMIC[dynamic]))
    ahead, (graph,) = make_llm(half, **settings(half, **DYNAMIC[dynamic]))
    expected = {request.request_id: reference_ids(half, request) for request in REQUESTS}
    first, second = eager.generate(REQUESTS), ahead.generate(REQUESTS)
    assert ids_of(first) == ids_of(second) == expected
    assert counts(eager) == counts(ahead)
    assert accepted(first) == accepted(second)
    assert ahead.engine.stats().num_device_rounds > 0
    assert graph.shapes


def test_what_dynamic_rows_win(half: World, whole: World) -> None:
    """Half the vocabulary loses drafts; the request's own ids and a projection win some back."""
    found = {
        name: accepted(
            make_llm(half, is_eager=True, **settings(half, **given))[0].generate(REQUESTS)
        )
        for name, given in DYNAMIC.items()
    }
    full = accepted(make_llm(whole, is_eager=True, **settings(whole))[0].generate(REQUESTS))
    assert found["map"] < found["own"]
    # So few ids are outside that the projection brings all of them: the full head's drafts.
    assert found["map"] < found["rank"] == found["both"] == full


def test_a_map_of_every_reachable_id_changes_nothing(
    kind: Kind, whole: World, tmp_path: Path
) -> None:
    """The same ids, counts and graph keys as without a map."""
    mapped = last_state_world(tmp_path, kind, token_map=range(TOKENIZER_SIZE))
    plain, (graph,) = make_llm(whole, **settings(whole))
    other, (other_graph,) = make_llm(mapped, **settings(mapped))
    assert ids_of(plain.generate(REQUESTS)) == ids_of(other.generate(REQUESTS))
    assert counts(plain) == counts(other)
    assert graph.shapes == other_graph.shapes


@pytest.mark.parametrize("dynamic", ["map", "both"])
def test_sampled_and_preempted_requests_beside_greedy_ones(half: World, dynamic: str) -> None:
    requests = [
        RequestInput(
            request_id=str(index),
            prompt_ids_target=prompt_of(20 + index, length),
            params=SamplingParams(temperature=0.7 * (index % 2), seed=index),
            max_tokens=24,
            ignore_eos=True,
        )
        for index, length in enumerate((17, 3, 30, 9))
    ]
    given = settings(half, **DYNAMIC[dynamic]) | {"num_kv_blocks": 17}
    rig = make_rig(half, Overrides(**given))  # type: ignore[arg-type]
    answers = drive(rig, requests, arrivals={2: 4, 3: 6})
    for request in requests:
        assert answers[request.request_id].ids_target == reference_ids(half, request)


@pytest.mark.parametrize(
    ("given", "codes"),
    [
        ({"dynamic_rows": 8, "dynamic_rank": 4}, []),
        ({"proposer": "ngram", "dynamic_rows": 8}, ["SD805"]),
        ({"proposer": "none", "dynamic_rank": 8}, ["SD805"]),
    ],
)
def test_settings_without_effect_are_named(
    half: World, given: dict[str, object], codes: list[str]
) -> None:
    config = resolve_config(half.manifest, Overrides(device="cpu", **given))  # type: ignore[arg-type]
    found = [d for d in config.diagnostics if d.where.startswith("--dynamic")]
    assert [d.code for d in found] == codes
    assert (config.dynamic_rows, config.dynamic_rank) == ((0, 0) if codes else (8, 4))


def test_dynamic_rows_need_a_map_and_a_rank_that_fits(half: World, whole: World) -> None:
    config = resolve_config(whole.manifest, Overrides(device="cpu", dynamic_rows=8))
    assert [d.code for d in config.diagnostics if d.where == "--dynamic-rows"] == ["SD805"]
    for given in ({"dynamic_rank": 33}, {"dynamic_rows": -1}):
        with pytest.raises(DiagnosticError) as caught:
            resolve_config(half.manifest, Overrides(device="cpu", **given))
        (found,) = [d for d in caught.value.diagnostics if d.severity == "error"]
        assert (found.code, found.where) == ("SD832", f"--{next(iter(given)).replace('_', '-')}")
