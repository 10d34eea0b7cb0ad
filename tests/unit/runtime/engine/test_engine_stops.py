"""A request ends exactly where target-only decoding would, wherever the end lies in a block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from tests.engine_harness import (
    KV_BLOCK_SIZE,
    Rig,
    World,
    drive,
    make_rig,
    prompt_of,
    reference_ids,
)

GAMMA = 4
# Special ids have no text; without them every token is one character.
ONLY_TEXT = SamplingParams(logit_bias=((0, -100.0), (1, -100.0), (2, -100.0)))
FREE = RequestInput(
    request_id="free",
    prompt_ids_target=prompt_of(3, 9),
    params=ONLY_TEXT,
    max_tokens=24,
    ignore_eos=True,
)


@pytest.fixture(scope="session")
def free_ids(world: World) -> tuple[int, ...]:
    """A long answer without any stop."""
    return reference_ids(world, FREE)


def _always_right(world: World, continuation: tuple[int, ...], **overrides: object) -> Rig:
    return make_rig(
        world,
        Overrides(proposer="oracle", num_speculative_tokens=GAMMA, **overrides),
        script=OracleScript(continuations={tuple(FREE.prompt_ids_target): continuation}),
    )


@pytest.mark.parametrize("index", range(1, 12))
def test_end_id_inside_an_accepted_block_cuts_there(
    world: World, free_ids: tuple[int, ...], index: int
) -> None:
    """C085: rounds start at output 1, 6, 11, ...: eleven places cover every alignment twice."""
    end_id = free_ids[index]
    first = free_ids.index(end_id)
    rig = _always_right(world, free_ids)
    answer = drive(rig, [replace(FREE, stop_ids=(end_id,))])["free"]
    assert answer.ids_target == free_ids[: first + 1]
    assert answer.finish_reason == "stop"
    assert answer.usage.num_output_tokens == first + 1
    assert answer.text == world.tokenizer.decode(list(free_ids[:first]))
    # Drafts are counted before the cut: every round of this oracle accepts all of them.
    assert answer.usage.num_accepted_drafts == GAMMA * answer.usage.num_rounds
    stats = rig.engine.stats()
    # Target-only decoding has KV of all tokens but the last.
    num_computed = len(FREE.prompt_ids_target) + first
    assert stats.num_cached_kv_blocks == num_computed // KV_BLOCK_SIZE
    assert stats.num_output_tokens == first + 1


def test_end_ids_are_ordinary_under_ignore_eos(world: World, free_ids: tuple[int, ...]) -> None:
    answer = drive(_always_right(world, free_ids), [FREE])["free"]
    assert (answer.ids_target, answer.finish_reason) == (free_ids, "length")


@pytest.mark.parametrize("index", range(2, 12))
def test_stop_string_keeps_its_last_token_and_nothing_after(
    world: World, free_ids: tuple[int, ...], index: int
) -> None:
    """C087: a string over three tokens ends at every place of a block and across two blocks."""
    stop = world.tokenizer.decode(list(free_ids[index - 2 : index + 1]))
    whole = world.tokenizer.decode(list(free_ids))
    assert len(stop) == 3, "every token of this tokenizer is one character"
    end = whole.index(stop) + 3
    answer = drive(_always_right(world, free_ids), [replace(FREE, stop=(stop,))])["free"]
    assert answer.finish_reason == "stop"
    assert answer.ids_target == free_ids[:end]
    assert answer.text == whole[: end - 3]
    assert answer.usage.num_output_tokens == end


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("proposer", ["none", "oracle", "eagle3"])
def test_max_tokens_cuts_inside_a_block(
    world: World, free_ids: tuple[int, ...], proposer: str, max_tokens: int
) -> None:
    rig = make_rig(
        world,
        Overrides(proposer=proposer, num_speculative_tokens=GAMMA if proposer != "none" else None),
        script=OracleScript(continuations={tuple(FREE.prompt_ids_target): free_ids}),
    )
    answer = drive(rig, [replace(FREE, max_tokens=max_tokens)])["free"]
    assert (answer.ids_target, answer.finish_reason) == (free_ids[:max_tokens], "length")
    if max_tokens == 1:
        assert answer.usage.num_rounds == 0, "the token that prefill yields is in no round"


def test_the_last_rounds_are_drafted_in_full(world: World, free_ids: tuple[int, ...]) -> None:
    """Accept length counts drafts before the length cut, so `max_tokens` must not shorten them."""
    rig = _always_right(world, free_ids)
    answer = drive(rig, [replace(FREE, max_tokens=3)])["free"]
    assert answer.ids_target == free_ids[:3]
    assert (answer.usage.num_rounds, answer.usage.num_accepted_drafts) == (1, GAMMA)
    assert rig.engine.stats().accept_length == 1 + GAMMA


@pytest.mark.parametrize("max_model_len", range(17, 23))
def test_context_limit_ends_a_request(
    world: World, free_ids: tuple[int, ...], max_model_len: int
) -> None:
    rig = _always_right(world, free_ids, max_model_len=max_model_len)
    answer = drive(rig, [replace(FREE, max_tokens=None)])["free"]
    assert answer.ids_target == free_ids[: max_model_len - len(FREE.prompt_ids_target)]
    assert answer.finish_reason == "length"


def test_end_of_model_is_found_in_the_manifest(world: World) -> None:
    """An id that the manifest names as end token ends the request without being asked."""
    request = replace(FREE, ignore_eos=False, params=SamplingParams(logit_bias=((2, 100.0),)))
    answer = drive(make_rig(world, Overrides(proposer="eagle3")), [request])["free"]
    assert (answer.ids_target, answer.finish_reason, answer.text) == ((2,), "stop", "")


def test_min_tokens_holds_end_ids_back(world: World) -> None:
    request = replace(
        FREE, ignore_eos=False, params=SamplingParams(logit_bias=((2, 100.0),), min_tokens=7)
    )
    for proposer in ("none", "eagle3", "ngram"):
        answer = drive(make_rig(world, Overrides(proposer=proposer)), [request])["free"]
        assert len(answer.ids_target) == 8
        assert answer.ids_target[-1] == 2
        assert 2 not in answer.ids_target[:-1]


def test_presence_penalty_breaks_a_repetition_with_speculation_on(world: World) -> None:
    """C089: a model that repeats one token is made to stop by the penalty, drafts or not."""
    bias = ((5, 30.0),)
    stuck = replace(FREE, max_tokens=10, params=SamplingParams(logit_bias=bias))
    assert set(reference_ids(world, stuck)) == {5}
    freed = replace(
        stuck, params=SamplingParams(logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0)
    )
    wanted = reference_ids(world, replace(freed, max_tokens=24))
    assert set(wanted) != {5}
    for proposer in ("ngram", "eagle3", "oracle"):
        rig = make_rig(
            world,
            Overrides(proposer=proposer),
            script=OracleScript(continuations={tuple(FREE.prompt_ids_target): wanted}),
        )
        assert drive(rig, [replace(freed, max_tokens=24)])["free"].ids_target == wanted
