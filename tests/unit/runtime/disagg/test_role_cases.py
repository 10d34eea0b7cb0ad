"""Both roles off the straight path: prefix hits, chunks, early ends, aborts, tight pools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from runtime.disagg.frames import Failed, Frame, Prefilled, Released
from runtime.disagg.memory import MemoryTransport
from runtime.disagg.transport import BlockMove, Link
from runtime.engine.request import RequestDelta
from runtime.kv import KVLayer
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError, diagnose
from tests.engine_harness import KV_BLOCK_SIZE, World, prompt_of, reference_ids
from tests.fake_graph import make_agreeing_world
from tests.pd_gate import Gate, GatedTransport
from tests.pd_harness import (
    Pair,
    assert_right,
    finish,
    make_pair,
    pump,
    request_for,
)
from tests.tiny_last_state import last_state_world

EAGLE3 = {"proposer": "eagle3", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_agreeing_world(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> World:
    return last_state_world(tmp_path_factory.mktemp("layered"), "mtp", num_layers=4)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("flushed", ["none", "prefill", "decode"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp-layers"])
def test_prefix_hits_on_either_side(
    world: World, layered: World, pairs: list[Pair], kind: str, flushed: str
) -> None:
    """Blocks that the decode side has are not sent; those that the prefill side has are."""
    used = world if kind == "eagle3" else layered
    settings = EAGLE3 if kind == "eagle3" else EAGLE3 | {"proposer": "mtp"}
    pair = make_pair(used, **settings)
    pairs.append(pair)
    prefix = prompt_of(1, 3 * KV_BLOCK_SIZE)
    assert_right(used, pair, [request_for("a", (*prefix, *prompt_of(2, 9)))])
    if flushed == "prefill":
        pair.prefill.flush_cache()
    elif flushed == "decode":
        pair.decode.flush_cache()
    second = request_for(
        "b", (*prefix, *prompt_of(3, 7)), params=SamplingParams(temperature=0.6, seed=4)
    )
    answers = pair.run([second])
    assert answers["b"].ids_target == reference_ids(used, second)
    asked, answered = pair.wire.asked[-1], pair.wire.answered[-1]
    assert isinstance(answered, Prefilled)
    hit = 2 * KV_BLOCK_SIZE  # the draft's last entry in the third block knows the token after it
    assert answers["b"].usage.num_cached_tokens == hit
    assert asked.first_position == (0 if flushed == "decode" else hit)
    assert answered.num_cached_tokens == (0 if flushed == "prefill" else hit)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("chunk", [24, 8, 7, 3])
@pytest.mark.parametrize("kind", ["eagle3", "mtp-layers"])
def test_chunked_prefill(
    world: World, layered: World, pairs: list[Pair], kind: str, chunk: int
) -> None:
    used = world if kind == "eagle3" else layered
    settings = EAGLE3 if kind == "eagle3" else EAGLE3 | {"proposer": "mtp"}
    pair = make_pair(used, prefill_overrides={"prefill_chunk_size": chunk}, **settings)
    pairs.append(pair)
    assert_right(used, pair, [request_for(f"r{n}", prompt_of(n, n)) for n in (1, 8, 16, 17, 41)])
    pair.assert_nothing_is_held()


def test_requests_that_end_at_their_first_token(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, **EAGLE3)
    pairs.append(pair)
    prompt = prompt_of(5, 13)
    (first, *_) = reference_ids(world, request_for("x", prompt))
    text = world.tokenizer.decode([first])
    asked = [
        request_for("length", prompt, max_tokens=1),
        request_for("id", prompt, stop_ids=(first,)),
        request_for("text", prompt, stop=(text,)),
    ]
    answers = pair.run(asked)
    assert {name: answer.finish_reason for name, answer in answers.items()} == {
        "length": "length",
        "id": "stop",
        "text": "stop",
    }
    assert all(answer.ids_target == (first,) for answer in answers.values())
    assert answers["text"].text == ""
    assert all(answer.usage.num_rounds == 0 for answer in answers.values())
    pair.assert_nothing_is_held()


def test_options_decide_the_first_token_there_as_here(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, **EAGLE3)
    pairs.append(pair)
    prompt = prompt_of(6, 10)
    (first, *_) = reference_ids(world, request_for("x", prompt))
    asked = [
        request_for("bias", prompt, params=SamplingParams(logit_bias=((first, -100.0),))),
        request_for(
            "least", prompt, params=SamplingParams(min_tokens=3), stop_ids=(first,), max_tokens=6
        ),
        request_for("logprobs", prompt, params=SamplingParams(num_logprobs=2)),
        request_for(
            "penalties",
            prompt,
            params=SamplingParams(presence_penalty=1.0, temperature=0.7, seed=2),
        ),
    ]
    deltas: list[RequestDelta] = []
    for item in asked:
        pair.decode.add_request(item)
    deltas += finish(pair)
    for item in asked:
        mine = [delta for delta in deltas if delta.request_id == item.request_id]
        ids = tuple(token for delta in mine for token in delta.ids_target)
        assert ids == reference_ids(world, item), item.request_id
        if item.request_id == "logprobs":
            assert all(len(delta.logprobs) == len(delta.ids_target) for delta in mine)
    pair.assert_nothing_is_held()


def test_tight_pools_and_few_slots(world: World, pairs: list[Pair]) -> None:
    """Requests wait for room; preempted ones are computed again on the decode side."""
    pair = make_pair(
        world,
        decode_overrides={"num_kv_blocks": 14, "max_num_requests": 3, "max_model_len": 96},
        prefill_overrides={"num_kv_blocks": 14, "max_num_requests": 2, "max_model_len": 96},
        **EAGLE3,
    )
    pairs.append(pair)
    assert_right(
        world,
        pair,
        [request_for(f"r{n}", prompt_of(n, 5 + 3 * n), max_tokens=30) for n in range(7)],
    )
    assert pair.decode.stats().num_preemptions > 0
    pair.assert_nothing_is_held()


def gated(world: World, pairs: list[Pair], **settings: Any) -> tuple[Pair, Gate]:
    gate = Gate()
    pair = make_pair(world, transport=GatedTransport(gate), **EAGLE3, **settings)
    pairs.append(pair)
    return pair, gate


def test_c071_blocks_wait_for_the_writer_after_an_abort(world: World, pairs: list[Pair]) -> None:
    """The pool holds one request: the next one gets its blocks when nothing is written any more."""
    pair, gate = gated(world, pairs, decode_overrides={"num_kv_blocks": 6, "max_model_len": 40})
    first = request_for("a", prompt_of(1, 30))
    pair.decode.add_request(first)
    pump(pair, steps=4)  # the first token is made, the KV stands at the gate
    (asked,) = pair.wire.asked
    assert not pair.wire.answered
    assert pair.decode.abort("a")
    second = request_for("b", prompt_of(2, 29))
    pair.decode.add_request(second)
    pump(pair, steps=20)
    assert len(pair.wire.asked) == 1  # no room: the blocks are still written to
    assert gate.writes == 0
    gate.is_open.set()
    ids = tuple(token for delta in finish(pair) for token in delta.ids_target)
    assert ids == reference_ids(world, second, max_model_len=40)
    assert set(pair.wire.asked[1].blocks) & set(asked.blocks)
    assert [type(frame) for frame in pair.wire.answered] == [Released, Prefilled]
    pair.assert_nothing_is_held()


def test_c071_without_the_hold_blocks_are_used_while_they_are_written(
    world: World, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above guards against is real in a mutant that holds nothing."""
    pair, gate = gated(world, pairs, decode_overrides={"num_kv_blocks": 6, "max_model_len": 40})
    monkeypatch.setattr(pair.decode.engine.handover, "hold", lambda request, name: None)
    pair.decode.add_request(request_for("a", prompt_of(1, 30)))
    pump(pair, steps=4)
    (asked,) = pair.wire.asked
    assert pair.decode.abort("a")
    pair.decode.add_request(request_for("b", prompt_of(2, 29)))
    pump(pair, steps=3)
    assert set(pair.wire.asked[1].blocks) & set(asked.blocks)
    assert gate.writes == 0
    gate.is_open.set()
    finish(pair)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6, 9])
def test_aborts_before_during_and_after(world: World, pairs: list[Pair], steps: int) -> None:
    pair = make_pair(world, prefill_overrides={"prefill_chunk_size": 7}, **EAGLE3)
    pairs.append(pair)
    other = request_for("other", prompt_of(3, 20))
    pair.decode.add_request(request_for("gone", prompt_of(2, 25), max_tokens=40))
    pair.decode.add_request(other)
    deltas = pump(pair, steps=steps)
    assert pair.decode.abort("gone")
    assert not pair.decode.abort("gone")
    later = finish(pair)
    assert not [delta for delta in later if delta.request_id == "gone"]
    found = [*deltas, *later]
    ids = tuple(t for delta in found if delta.request_id == "other" for t in delta.ids_target)
    assert ids == reference_ids(world, other)
    again = replace(other, request_id="gone")  # the name may be used again
    assert_right(world, pair, [again])
    pair.assert_nothing_is_held()


class Broken(MemoryTransport):
    """Every write fails."""

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> Any:
        link = super().connect(address, layers)

        class Bad:
            is_ordered = False

            def write(self, move: BlockMove) -> None:
                raise DiagnosticError(
                    diagnose("SD863", where="transport `memory`", message="torn", found="a cut")
                )

            finish, close = link.finish, link.close

        bad: Link = Bad()
        return bad


def test_a_failed_transfer_ends_the_request_with_its_code(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, transport=Broken(), **EAGLE3)
    pairs.append(pair)
    pair.decode.add_request(request_for("a", prompt_of(1, 12)))
    (delta,) = finish(pair)
    assert (delta.finish_reason, delta.ids_target) == ("error", ())
    assert delta.error is not None
    assert delta.error.code == "SD863"
    pair.assert_nothing_is_held()


def test_writing_stops_when_the_decode_server_is_not_heard_of(
    world: World, pairs: list[Pair]
) -> None:
    pair = make_pair(world, **EAGLE3)
    pairs.append(pair)
    pair.wire.is_writable = False
    pair.decode.add_request(request_for("a", prompt_of(1, 12)))
    (delta,) = finish(pair)
    assert delta.error is not None
    assert delta.error.code == "SD863"
    assert not pair.caches["decode"].pool.layers[0].k.any()
    pair.assert_nothing_is_held()


def test_a_request_that_cannot_run_there_ends_here(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, prefill_overrides={"max_model_len": 16}, **EAGLE3)
    pairs.append(pair)
    pair.decode.add_request(request_for("a", prompt_of(1, 20)))
    pair.decode.add_request(request_for("b", prompt_of(1, 10)))
    deltas = finish(pair)
    (failed,) = [delta for delta in deltas if delta.error is not None]
    assert failed.error is not None
    assert (failed.request_id, failed.error.code) == ("a", "SD909")
    assert failed.error.where == "request=a"
    ids = tuple(token for delta in deltas if delta.request_id == "b" for token in delta.ids_target)
    assert ids == reference_ids(world, request_for("b", prompt_of(1, 10)))
    pair.assert_nothing_is_held()


def test_admission_counts_requests_that_wait_for_kv(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, max_num_waiting=1, decode_overrides={"max_num_requests": 1}, **EAGLE3)
    pairs.append(pair)
    for name in ("a", "b"):
        pair.decode.add_request(request_for(name, prompt_of(1, 5)))
    with pytest.raises(DiagnosticError, match="SD904"):
        pair.decode.add_request(request_for("b", prompt_of(1, 5)))
    with pytest.raises(DiagnosticError, match="SD914"):
        pair.decode.add_request(request_for("c", prompt_of(1, 5)))
    assert pair.decode.stats().num_waiting == 2
    finish(pair)
    with pytest.raises(DiagnosticError, match="SD868"):
        pair.prefill.add_request(request_for("d", prompt_of(1, 5)))
    pair.assert_nothing_is_held()


def test_failed_frames_name_the_client_s_request(world: World, pairs: list[Pair]) -> None:
    pair = make_pair(world, **EAGLE3)
    pairs.append(pair)

    def refuse(frame: Frame) -> Frame:
        problem = diagnose("SD861", where="peer x:1", message="lost", expected="a", found="b")
        return Failed(request_id=frame.request_id, problem=problem)  # type: ignore[union-attr]

    pair.wire.change = refuse
    pair.decode.add_request(request_for("a", prompt_of(1, 12)))
    (delta,) = finish(pair)
    assert delta.error is not None
    assert (delta.request_id, delta.error.where) == ("a", "peer x:1")
    pair.assert_nothing_is_held()


def test_a_fault_of_no_request_is_told_and_prompts_after_it_run(
    world: World, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(world, **EAGLE3)
    pairs.append(pair)

    def broken(*_: object) -> None:
        raise RuntimeError("device-side fault")

    with monkeypatch.context() as patched:
        patched.setattr(pair.prefill.engine, "step", broken)
        pair.decode.add_request(request_for("a", prompt_of(1, 12)))
        pair.decode.step()
        with pytest.raises(RuntimeError, match="device-side fault"):
            pair.prefill.step()
    (delta,) = finish(pair)
    assert delta.error is not None
    assert (delta.request_id, delta.error.code) == ("a", "SD916")
    assert_right(world, pair, [request_for("b", prompt_of(2, 9))])
    pair.assert_nothing_is_held()
