"""Prompts of all lengths, alone and at once, with every way to choose tokens and fewer drafts."""

from __future__ import annotations

from dataclasses import replace

from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests.engine_harness import prompt_of

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=0.7, top_k=12, top_p=0.8, min_p=0.01, seed=7),
    SamplingParams(num_logprobs=3),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1),
)


def load(llm: LLM, *, longest: int) -> None:
    """Run prompts of all lengths, alone and at once, with every kind of choice and draft count."""
    lengths = [n for n in (1, 5, 17, 33, 70, 130, 250, 300, 500, 900, 1500) if n <= longest]
    alone = [mixed_request(n, n, KINDS[0]) for n in lengths]
    alone += [mixed_request(50 + i, 20, params) for i, params in enumerate(KINDS)]
    for request in alone:
        llm.generate([request])
    for count in (2, 3, 5, 8):
        llm.generate([mixed_request(100 + i, 11 + 7 * i, KINDS[0]) for i in range(count)])
        llm.generate([mixed_request(200 + i, 11 + 7 * i, KINDS[i % 5]) for i in range(count)])
    for count in range(llm.config.num_speculative_tokens):
        few = mixed_request(500 + count, 20, KINDS[3 + count % 2])
        llm.generate([replace(few, num_speculative_tokens=count)])
    together = min(longest, 300)
    llm.generate([mixed_request(300 + i, together, KINDS[0]) for i in range(8)])
    llm.generate([mixed_request(400 + i, together - 16 * i, KINDS[i % 5]) for i in range(8)])


def mixed_request(seed: int, length: int, params: SamplingParams) -> RequestInput:
    return RequestInput(
        request_id=f"r{seed}-{length}",
        prompt_ids_target=prompt_of(seed, length),
        params=params,
        max_tokens=6,
        ignore_eos=True,
    )
