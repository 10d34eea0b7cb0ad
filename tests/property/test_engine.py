"""Any mix of requests under any limits: same tokens as alone, budgets kept, nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from tests.engine_harness import KV_BLOCK_SIZE, World, drive, make_rig, make_world, prompt_of
from tests.engine_harness import reference_ids as decode_alone

MAX_MODEL_LEN = 48
# What preemption, a prefix hit and rejected drafts could make a request forget or count twice.
OPTIONS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(
        temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, logit_bias=((5, 3.0), (9, -2.0))
    ),
    "penalised": SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3, min_tokens=6
    ),
    "sampled-penalised": SamplingParams(
        temperature=0.9, choice_index=1, frequency_penalty=0.5, min_tokens=3
    ),
}


@cache
def world() -> World:
    return make_world(Path(mkdtemp(prefix="engine-property-")))


@cache
def reference(seed: int, length: int, max_tokens: int, options: str) -> tuple[int, ...]:
    return decode_alone(
        world(), _request(seed, length, max_tokens, options), max_model_len=MAX_MODEL_LEN
    )


def _request(seed: int, length: int, max_tokens: int, options: str) -> RequestInput:
    # Few seeds and a shared stem: prompts repeat, and differ after common blocks.
    stem = prompt_of(99, 24)[: length // 2]
    return RequestInput(
        request_id="",
        prompt_ids_target=stem + prompt_of(seed, length - len(stem)),
        params=replace(OPTIONS[options], seed=seed),
        max_tokens=max_tokens,
    )


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # seed
        st.sampled_from([1, 2, 8, 9, 17, 25, 36]),  # prompt length
        st.sampled_from([1, 5, 14]),  # max_tokens
        st.sampled_from(sorted(OPTIONS)),
        st.integers(0, 8),  # arrival
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shapes=REQUESTS,
    proposer=st.sampled_from(["eagle3", "oracle", "ngram", "none"]),
    gamma=st.integers(1, 5),
    max_num_requests=st.integers(1, 5),
    spare_rows=st.integers(0, 40),
    chunk=st.integers(1, 40),
    num_kv_blocks=st.integers(1 + MAX_MODEL_LEN // KV_BLOCK_SIZE, 30),
    has_cache=st.booleans(),
)
def test_any_traffic_gives_the_tokens_of_each_request_alone(
    shapes: list[tuple[int, int, int, str, int]],
    proposer: str,
    gamma: int,
    max_num_requests: int,
    spare_rows: int,
    chunk: int,
    num_kv_blocks: int,
    has_cache: bool,
) -> None:
    budget = max_num_requests + spare_rows
    requests = [
        replace(_request(*shape[:4]), request_id=str(index)) for index, shape in enumerate(shapes)
    ]
    wanted = {str(index): reference(*shape[:4]) for index, shape in enumerate(shapes)}
    rig = make_rig(
        world(),
        Overrides(
            proposer=proposer,
            num_speculative_tokens=gamma,
            max_num_requests=max_num_requests,
            max_num_batched_tokens=budget,
            prefill_chunk_size=chunk,
            num_kv_blocks=num_kv_blocks,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_cache=has_cache,
        ),
        script=OracleScript(continuations=dict(wanted), corruption_rates=(0.3,)),
    )
    answers = drive(rig, requests, arrivals={i: shape[4] for i, shape in enumerate(shapes)})
    assert {name: answer.ids_target for name, answer in answers.items()} == wanted
    stats = rig.engine.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    assert stats.num_output_tokens == sum(map(len, wanted.values()))
    assert stats.num_prompt_tokens == sum(shape[1] for shape in shapes)
    assert len(rig.proposer.released) == len(requests) + stats.num_preemptions
