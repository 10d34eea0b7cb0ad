"""Ladder step 4 on tiny models: every proposer, mixed draft counts, every accepted length.

The run on the real target is tests/gpu/test_ladder_gpu.py; both go through tests/ladder.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.kernels import Stream, enter_stream
from runtime.spec.types import SamplingParams
from tests import ladder
from tests.engine_harness import World, make_world
from tests.fake_graph import make_agreeing_world
from tests.invariance import RESIDUAL_LINEAR
from tests.tiny import TOKENIZER_SIZE
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

MAX_GAMMA = 4
NUM_AT_ONCE = 2  # requests of the negative control
KINDS = (SamplingParams(), SamplingParams(), SamplingParams(temperature=0.7))
BLENDED = {"replacement_rate": 0.75, "corruption_rates": (0.1,), "seed": 3}
RULES: dict[str, dict[str, Any] | None] = {
    "ngram": None,
    "oracle": {"corruption_rates": (0.3,), "seed": 3},
}
TINY = ladder.Ladder(
    requests=ladder.requests_for(
        ladder.synthetic_prompts(8, ids=(3, TOKENIZER_SIZE), max_length=24),
        max_tokens=36,
        kinds=KINDS,
    ),
    max_gamma=MAX_GAMMA,
    settings={"max_num_requests": 4},
    is_eager=False,
)
BLOCKS = {
    "dspark": BlockCase(),
    "dflash": BlockCase(markov=None, sample_from_anchor=False),
    "dflash2": BlockCase(
        markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None
    ),
}


def world_of(kind: str, folder: Path) -> World:
    if kind in BLOCKS:
        return make_block_world(folder, BLOCKS[kind])
    if kind == "peagle":
        return parallel_world(folder)
    if kind in ("mtp", "mtp-layers", "eagle"):
        name, _, layers = kind.partition("-")
        return last_state_world(
            folder, "eagle" if name == "eagle" else "mtp", num_layers=4 if layers else 1
        )
    return make_agreeing_world(folder)


@pytest.mark.parametrize(
    "kind",
    ["eagle", "eagle3", "peagle", "mtp", "mtp-layers", *BLOCKS, "oracle", "ngram"],
)
def test_mixed_draft_counts_change_no_token(kind: str, tmp_path: Path) -> None:
    world = world_of(kind, tmp_path)
    answers = ladder.target_only(TINY, world)
    found = ladder.climb(
        TINY,
        world,
        answers,
        proposer=kind.partition("-")[0],
        requests=TINY.mixed(),
        rules=RULES.get(kind, BLENDED),
    )
    assert found.first_divergences == {}
    if kind == "ngram":
        assert sum(found.rounds_by_accepted[1:]) > 0
    else:
        assert min(found.rounds_by_accepted) > 0, "a count of accepted drafts never came"
        assert found.num_device_rounds > 0


def test_a_split_that_follows_the_row_count_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ladder step 6, on sequences: target-only decoding in a row each, drafts in rows of five."""
    world = make_world(tmp_path)
    monkeypatch.setattr(RESIDUAL_LINEAR, _halves_when_there_are_more_rows)
    control = replace(TINY, settings={"max_num_requests": NUM_AT_ONCE}, is_eager=True)
    found = ladder.climb_in_more_rows(control, world, num_drafts=MAX_GAMMA)
    assert found.first_divergences != {}


def test_answers_are_made_once_for_all_processes(tmp_path: Path) -> None:
    answers = {"0001": (3, 4, 5), "0000": ()}
    assert ladder.shared_answers(tmp_path, lambda: answers) == answers
    assert ladder.shared_answers(tmp_path, dict) == answers


def _halves_when_there_are_more_rows(
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
    out_MD: torch.Tensor | None = None,
) -> Stream:
    """Split K by the row count and keep partial sums in bfloat16.

    Two float32 halves change a token of these few once in many runs only.
    """
    splits = 1 if x_MK.shape[0] <= NUM_AT_ONCE else 2
    parts = zip(x_MK.chunk(splits, dim=1), weight_DK.chunk(splits, dim=1), strict=True)
    total_MD = sum(
        ((x @ w.t()).bfloat16().float() for x, w in parts),
        start=torch.zeros_like(residual_MD) if bias_D is None else bias_D,
    )
    stream_MD = total_MD + residual_MD
    return enter_stream(stream_MD if out_MD is None else out_MD.copy_(stream_MD), norm_D)


def test_what_is_counted() -> None:
    expected = {"a": (1, 2, 3, 4), "b": (1, 2, 3, 4), "c": (1, 2)}
    found = {"a": (1, 2, 3), "b": (1, 5, 3), "c": (1, 2, 3)}
    assert ladder.divergences(expected, found) == {"b": 1, "c": 2}
    assert len({request.num_speculative_tokens for request in TINY.mixed()}) == MAX_GAMMA
