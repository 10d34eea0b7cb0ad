"""A row from which nothing can be chosen, behind tokens that the same round commits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from tests.fake_graph import make_agreeing_world, make_llm
from tests.prefill_cases import prefill_request
from tests.tiny_grammar import Grammar, dead_end

NUM_TOKENS = 7  # that `dead_end` allows


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, seed=5)])
def test_tokens_before_a_faulty_row_count(
    tmp_path: Path, is_eager: bool, params: SamplingParams
) -> None:
    """As without drafts: they may end the request, and are handed out before it fails."""
    world = make_agreeing_world(tmp_path)
    ends, fails = (
        prefill_request(seed, 9, params=params, max_tokens=most, masks=Grammar(dead_end))
        for seed, most in ((1, NUM_TOKENS), (2, NUM_TOKENS + 5))
    )
    plain, _ = make_llm(world, is_eager=True, proposer="none")
    expected = plain.generate([ends, fails])
    script = OracleScript(
        continuations={
            tuple(request.prompt_ids_target): (*answer.ids_target, *[5] * 4)
            for request, answer in zip((ends, fails), expected, strict=True)
        }
    )
    llm, _ = make_llm(
        world, is_eager=is_eager, proposer="oracle", num_speculative_tokens=3, script=script
    )
    found = llm.generate([replace(item, masks=Grammar(dead_end)) for item in (ends, fails)])
    for one, other in zip(found, expected, strict=True):
        assert one.ids_target == other.ids_target
        assert (one.finish_reason, one.error) == (other.finish_reason, other.error)
    assert [answer.finish_reason for answer in found] == ["length", "error"]
    assert [len(answer.ids_target) for answer in found] == [NUM_TOKENS, NUM_TOKENS]
    assert llm.engine.stats().num_accepted_at[0] > 0
    llm.engine.check()
