"""Roles of one process on one stream: nothing is waited for, and the answer leaves first.

An ordered link is over when it ends, so a prompt's answer leaves in the step that yields its first
token, with tensors as they are; slot and blocks are freed by the step after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch

from runtime.disagg.frames import Prefilled, TensorHere, keep_tensor, unpack_tensor
from runtime.disagg.memory import MemoryLink, MemoryTransport
from runtime.kv import KVLayer
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, prompt_of, reference_ids
from tests.fake_graph import make_agreeing_world
from tests.pd_harness import Pair, assert_right, finish, make_pair, request_for
from tests.tiny_last_state import last_state_world

CPU = torch.device("cpu")


class OrderedTransport(MemoryTransport):
    """As on one stream of a GPU."""

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> MemoryLink:
        link = super().connect(address, layers)
        link.is_ordered = True
        return link


@pytest.fixture(scope="module", params=["eagle3", "mtp-layers"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("ordered")
    if request.param == "eagle3":
        return make_agreeing_world(folder)
    return last_state_world(folder, "mtp", num_layers=3)


@pytest.fixture
def pair(world: World) -> Iterator[Pair]:
    made = make_ordered(world)
    yield made
    made.close()


def make_ordered(world: World, **overrides: Any) -> Pair:
    assert world.manifest.draft is not None
    return make_pair(
        world,
        transport=OrderedTransport(),
        is_local=True,
        with_graphs=True,
        proposer=world.manifest.draft.algorithm,
        num_speculative_tokens=3,
        **overrides,
    )


def test_answers_are_the_target_s_own_and_everything_is_freed(world: World) -> None:
    """With one slot a prompt waits for the one that was told; tables grow behind their rows."""
    pair = make_ordered(world, max_num_requests=2, prefill_overrides={"max_num_requests": 1})
    requests = [
        request_for(f"r{i}", prompt_of(i, 9 + 7 * i), max_tokens=6 + 10 * (i % 2)) for i in range(4)
    ]
    assert_right(world, pair, requests)
    pair.assert_nothing_is_held()
    pair.close()


def test_the_answer_leaves_in_the_step_that_yields_the_first_token(pair: Pair) -> None:
    pair.decode.add_request(request_for("a", prompt_of(1, 29)))
    pair.decode.step()
    pair.prefill.step()
    (answer,) = pair.wire.answered
    assert isinstance(answer, Prefilled)
    assert all(isinstance(item, TensorHere) for item in answer.state)
    stats = pair.prefill.engine.stats()
    assert stats.num_free_kv_blocks < stats.num_kv_blocks, "the decode side is told first"
    assert pair.prefill.has_work, "another step frees the blocks"
    pair.prefill.step()
    stats = pair.prefill.engine.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    finish(pair)
    pair.assert_nothing_is_held()


def test_rows_are_written_while_the_prompt_is_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the answer only the first token is missing, and the captured round follows."""
    (graph,) = pair.graphs
    state, calls = graph.round.state, list[str]()

    def noted(name: str) -> Callable[..., object]:
        write = getattr(state, name)

        def call(*given: object) -> object:
            calls.append(name)
            return write(*given)

        return call

    for name in ("write_requests", "write_newest", "write_blocks"):
        monkeypatch.setattr(state, name, noted(name))
    pair.decode.add_request(request_for("a", prompt_of(1, 29)))
    pair.decode.step()
    assert calls == ["write_requests", "write_newest"]
    pair.prefill.step()
    assert not graph.shapes
    calls.clear()
    pair.decode.step()
    assert calls == ["write_newest"]
    assert graph.shapes[0].num_drafts == 3
    finish(pair)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_abort_at_any_step_frees_both_sides(world: World, pair: Pair, num_steps: int) -> None:
    pair.decode.add_request(request_for("gone", prompt_of(1, 29)))
    other = request_for("other", prompt_of(2, 17))
    pair.decode.add_request(other)
    pair.decode.step()
    for _ in range(num_steps):
        pair.prefill.step()
    assert pair.decode.abort("gone")
    ids = [t for delta in finish(pair) if delta.request_id == "other" for t in delta.ids_target]
    assert tuple(ids) == reference_ids(world, other)
    pair.assert_nothing_is_held()


def test_laws_travel_as_tensors(world: World) -> None:
    pair = make_ordered(world, verification="rejection", first_proposal="full")
    drawn = SamplingParams(temperature=0.9, seed=3)
    pair.decode.add_request(request_for("a", prompt_of(1, 12), params=drawn))
    pair.decode.step()
    pair.prefill.step()
    (answer,) = pair.wire.answered
    assert isinstance(answer, Prefilled)
    assert isinstance(answer.draft_probs, TensorHere)
    assert answer.draft_probs.value.shape[0] == len(answer.draft_ids_target) > 0
    finish(pair)
    pair.assert_nothing_is_held()
    pair.close()


def test_a_tensor_that_is_kept_is_the_same_one_and_no_connection_takes_it() -> None:
    value = torch.randn(3, 2).to(torch.bfloat16)
    kept = keep_tensor("feedback", value)
    assert (kept.name, kept.dtype, kept.shape) == ("feedback", "bfloat16", (3, 2))
    assert unpack_tensor(kept, CPU).data_ptr() == value.data_ptr()
    with pytest.raises(TypeError, match="Tensor"):
        msgspec.msgpack.encode(kept)
