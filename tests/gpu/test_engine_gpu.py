"""The same equalities on CUDA: drafts, batches, chunks, preemption and prefixes change no token."""

from __future__ import annotations

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, drive, make_rig, make_world, prompt_of, reference_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, seed=2),
)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 5 * index),
        params=PARAMS[index % len(PARAMS)],
        max_tokens=24,
    )
    for index in range(8)
)


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(
        tmp_path_factory.mktemp("engine-gpu"),
        device=torch.device("cuda", 0),
        dtype=getattr(torch, request.param),
    )


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, tuple[int, ...]]:
    return {request.request_id: reference_ids(world, request) for request in REQUESTS}


@pytest.mark.parametrize("gamma", [1, 3, 4, 8])
@pytest.mark.parametrize("proposer", ["eagle3", "oracle", "ngram"])
def test_speculation_equals_target_only_decoding(
    world: World, expected: dict[str, tuple[int, ...]], proposer: str, gamma: int
) -> None:
    rig = make_rig(
        world,
        Overrides(proposer=proposer, num_speculative_tokens=gamma, max_num_requests=gamma),
        script=OracleScript(continuations=dict(expected), corruption_rates=(0.2, 0.4)),
    )
    answers = drive(rig, REQUESTS, arrivals={index: 2 * index for index in range(8)})
    assert {name: answer.ids_target for name, answer in answers.items()} == expected
    assert rig.engine.stats().num_drafts > 0


def test_a_batch_of_eight_equals_each_alone(
    world: World, expected: dict[str, tuple[int, ...]]
) -> None:
    rig = make_rig(world, Overrides(proposer="none", max_num_requests=8))
    answers = drive(rig, REQUESTS)
    assert {name: answer.ids_target for name, answer in answers.items()} == expected


@pytest.mark.parametrize("budget", [6, 17, 512])
def test_chunks_preemption_and_prefix_hits_change_nothing(
    world: World, expected: dict[str, tuple[int, ...]], budget: int
) -> None:
    rig = make_rig(
        world,
        Overrides(
            proposer="eagle3",
            num_speculative_tokens=3,
            max_num_batched_tokens=budget,
            num_kv_blocks=12,
            max_model_len=64,
        ),
    )
    for _ in range(2):
        answers = drive(rig, REQUESTS)
        assert {name: answer.ids_target for name, answer in answers.items()} == expected
    assert rig.engine.stats().num_preemptions > 0
