"""Requests of every kind in one batch, each with its own draft count: nobody's tokens change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, prompt_of
from tests.fake_graph import ids_of, make_llm

GAMMA = 8
KINDS = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=0.8, seed=5),
    "cold": SamplingParams(temperature=1e-9, seed=6),
    "hot": SamplingParams(temperature=1e9, top_k=3, seed=-(2**63)),
    "widest": SamplingParams(temperature=1.0, top_k=2**63 - 1, seed=2**63 - 1),
    "narrowest": SamplingParams(temperature=2.0, top_p=1e-30, seed=7),
    "likeliest": SamplingParams(temperature=2.0, min_p=1.0, seed=8),
    "penalties": SamplingParams(
        temperature=0.9, presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.5, seed=9
    ),
    "bias": SamplingParams(logit_bias=((5, 100.0), (7, -100.0))),
    "logprobs": SamplingParams(temperature=0.9, num_logprobs=20, seed=10),
    "min tokens": SamplingParams(temperature=0.9, min_tokens=6, seed=11),
}


def requests() -> list[RequestInput]:
    return [
        RequestInput(
            request_id=name,
            prompt_ids_target=prompt_of(80 + index, (1, 7, 8, 9, 30)[index % 5]),
            params=params,
            max_tokens=(1, 7, 11)[index % 3],
            ignore_eos=index % 2 == 0,
            num_speculative_tokens=index % (GAMMA + 1),
        )
        for index, (name, params) in enumerate(KINDS.items())
    ]


@pytest.mark.parametrize(
    ("verification", "length_mode"), [("seeded", "compact"), ("rejection", "static")]
)
def test_a_mixed_batch_changes_nobody(agreeing: World, verification: str, length_mode: str) -> None:
    settings: dict[str, Any] = {
        "proposer": "eagle3",
        "num_speculative_tokens": GAMMA,
        "verification": verification,
        "length_mode": length_mode,
    }
    asked = requests()
    plain, _ = make_llm(agreeing, is_eager=True, proposer="none", max_num_requests=1)
    ahead, (graph,) = make_llm(agreeing, **settings)
    target_only = [replace(item, num_speculative_tokens=None) for item in asked]
    found, without = ids_of(ahead.generate(asked)), ids_of(plain.generate(target_only))
    for item in asked:
        if verification == "seeded" or item.params.is_greedy:
            assert found[item.request_id] == without[item.request_id], item.request_id
    assert graph.shapes
    if length_mode == "static":
        alone, _ = make_llm(agreeing, **settings, max_num_requests=1)
        assert ids_of(alone.generate(asked)) == found
