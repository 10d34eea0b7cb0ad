"""Verification modes and log probabilities through the engine, with a draft and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runtime.config import Overrides
from runtime.engine.llm import Completion
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, prompt_of
from tests.fake_graph import make_llm

MODES = ("seeded", "rejection")


def requests(num_requests: int = 3, **changes: object) -> list[RequestInput]:
    """Return requests with temperatures and seeds of their own."""
    return [
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=prompt_of(index, 4 + index),
            params=replace(
                SamplingParams(temperature=0.8 + 0.2 * index, top_p=0.95, seed=50 + index),
                **changes,  # type: ignore[arg-type]
            ),
            max_tokens=14,
            ignore_eos=True,
        )
        for index in range(num_requests)
    ]


def answers(world: World, asked: list[RequestInput], **overrides: Any) -> list[Completion]:
    llm, _ = make_llm(world, is_eager=True, **overrides)
    return list(llm.generate(asked))


def test_rejection_answers_are_fixed_by_the_seed_whatever_the_batch(world: World) -> None:
    asked = requests()
    options = {"verification": "rejection", "num_speculative_tokens": 3}
    together = answers(world, asked, **options)
    again = answers(world, asked[::-1], **options)[::-1]
    alone = [answers(world, [item], **options)[0] for item in asked]
    ids = [item.ids_target for item in together]
    assert [item.ids_target for item in again] == ids
    assert [item.ids_target for item in alone] == ids
    assert sum(item.usage.num_drafts for item in together) > 0


def test_rejection_without_drafts_equals_seeded(world: World) -> None:
    seeded = answers(world, requests(), proposer="none")
    drawn = answers(world, requests(), proposer="none", verification="rejection")
    assert [item.ids_target for item in drawn] == [item.ids_target for item in seeded]


def test_greedy_requests_are_exact_in_rejection_mode(world: World) -> None:
    asked = [replace(item, params=SamplingParams(num_logprobs=2)) for item in requests()]
    plain = answers(world, asked, proposer="none")
    drafted = answers(world, asked, verification="rejection", num_speculative_tokens=3)
    assert [item.ids_target for item in drafted] == [item.ids_target for item in plain]
    assert [item.logprobs for item in drafted] == [item.logprobs for item in plain]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_have_the_same_bits_with_and_without_a_draft(
    world: World, temperature: float
) -> None:
    asked = requests(temperature=temperature)
    llm, _ = make_llm(world, is_eager=True, proposer="none")
    plain = llm.generate(asked, logprobs=3)
    llm, _ = make_llm(world, num_speculative_tokens=3)
    drafted = llm.generate(
        [replace(item, request_id=f"x{item.request_id}") for item in asked], logprobs=3
    )
    for left, right in zip(plain, drafted, strict=True):
        assert left.ids_target == right.ids_target
        assert len(left.logprobs) == len(left.ids_target)
        assert left.logprobs == right.logprobs


def test_tokens_that_a_stop_cuts_off_have_no_logprobs(world: World) -> None:
    asked = requests(1, temperature=0.0)
    whole = answers(world, asked, num_speculative_tokens=3)[0]
    stop = whole.ids_target[5]
    cut = replace(asked[0], stop_ids=(stop,), params=SamplingParams(num_logprobs=0))
    answer = answers(world, [cut], num_speculative_tokens=3)[0]
    length = whole.ids_target.index(stop) + 1
    assert answer.ids_target == whole.ids_target[:length]
    assert len(answer.logprobs) == length


def test_the_mode_comes_from_the_manifest_or_the_user(world: World) -> None:
    llm, _ = make_llm(world, is_eager=True)
    assert llm.config.verification == "seeded"
    assert llm.config.origins["verification"] == "manifest"
    llm, _ = make_llm(world, is_eager=True, verification="rejection")
    assert llm.config.origins["verification"] == "given"
    with pytest.raises(DiagnosticError) as caught:
        make_llm(world, is_eager=True, verification="typical")
    assert [item.code for item in caught.value.diagnostics] == ["SD832"]


def test_too_many_logprobs_are_refused(world: World) -> None:
    llm, _ = make_llm(world, is_eager=True)
    with pytest.raises(DiagnosticError) as caught:
        llm.generate(requests(1), logprobs=21)
    assert [item.code for item in caught.value.diagnostics] == ["SD904"]


def test_overrides_name_the_mode() -> None:
    assert Overrides(verification=MODES[1]).verification == "rejection"
