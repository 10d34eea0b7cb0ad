"""What the draft keeps of a request travels whole and at its own width, or is missed by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from runtime.disagg.frames import Frame, Prefilled
from runtime.spec.types import SlotTensor
from tests.engine_harness import World, prompt_of
from tests.fake_graph import make_agreeing_world
from tests.pd_harness import Pair, finish, make_pair, request_for
from tests.tiny_last_state import last_state_world

EAGLE3 = {"proposer": "eagle3", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_agreeing_world(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> World:
    return last_state_world(tmp_path_factory.mktemp("layered"), "mtp", num_layers=4)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def drop_one(name: str) -> Any:
    def change(frame: Frame) -> Frame:
        if not isinstance(frame, Prefilled):
            return frame
        kept = [item for item in frame.state if item.name != name]
        assert len(kept) < len(frame.state)
        return msgspec.structs.replace(frame, state=kept)

    return change


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eagle3", "feedback"),
        ("mtp-layers", "kept"),
        ("mtp-layers", "head_input"),
        ("mtp-layers", "first_position"),
    ],
)
def test_c067_a_state_that_does_not_come_is_noticed(
    world: World, layered: World, pairs: list[Pair], kind: str, name: str
) -> None:
    used = world if kind == "eagle3" else layered
    settings = EAGLE3 if kind == "eagle3" else EAGLE3 | {"proposer": "mtp"}
    pair = make_pair(used, **settings)
    pairs.append(pair)
    pair.wire.change = drop_one(name)
    pair.decode.add_request(request_for("a", prompt_of(1, 12)))
    (delta,) = finish(pair)
    assert delta.error is not None
    assert delta.error.code == "SD867"
    assert name in str(delta.error.expected)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("kind", ["eagle3", "mtp-layers"])
def test_c067_what_is_sent_is_all_that_a_slot_keeps(
    world: World, layered: World, pairs: list[Pair], kind: str
) -> None:
    """Every tensor of the proposer with a row for each slot is stated, and every KV layer sent."""
    used = world if kind == "eagle3" else layered
    settings = EAGLE3 if kind == "eagle3" else EAGLE3 | {"proposer": "mtp"}
    pair = make_pair(used, max_num_requests=10, **settings)
    pairs.append(pair)
    proposer = pair.caches["decode"].proposer
    found = tensors_with(11, proposer)
    assert sorted(found) == sorted(
        (tuple(size for size in item.shape), item.dtype) for item in proposer.slot_state
    )
    pair.decode.add_request(request_for("a", prompt_of(1, 12)))
    finish(pair)
    written = [layer.k.any() and layer.v.any() for layer in pair.caches["decode"].pool.layers]
    assert all(written)
    assert len(written) == len(used.models.target.kv_specs) + len(used.models.draft.kv_specs)  # type: ignore[union-attr]


def tensors_with(size: int, item: object) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape without the slots, and dtype, of tensors with one dimension of `size`."""
    found: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
    seen: set[int] = set()

    def walk(value: object) -> None:
        if id(value) in seen or not type(value).__module__.startswith(("runtime.spec", "torch")):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if size in value.shape:
                rest = list(value.shape)
                rest.remove(size)
                found[value.data_ptr()] = (tuple(rest), value.dtype)
            return
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in names:
            walk(getattr(value, name))

    walk(item)
    return list(found.values())


@pytest.mark.parametrize("kind", ["eagle3", "mtp-layers"])
def test_c061_widths_are_the_draft_s(
    world: World, layered: World, pairs: list[Pair], kind: str
) -> None:
    """The hidden state on the wire is the draft's own, not the states that it was fed."""
    used = world if kind == "eagle3" else layered
    settings = EAGLE3 if kind == "eagle3" else EAGLE3 | {"proposer": "mtp"}
    pair = make_pair(used, **settings)
    pairs.append(pair)
    pair.run([request_for("a", prompt_of(1, 12))])
    (answer,) = pair.wire.answered
    assert isinstance(answer, Prefilled)
    assert used.manifest.draft is not None
    width = used.manifest.draft.decoder.hidden_size
    by_name = {item.name: item for item in answer.state}
    hidden = "feedback" if kind == "eagle3" else "head_input"
    assert by_name[hidden].shape == (width,)
    if kind == "eagle3":
        assert len(used.manifest.draft.aux_layer_ids or ()) * width != width
    stated = {item.name: str(item) for item in pair.caches["prefill"].proposer.slot_state}
    assert set(stated) == set(by_name)
    assert stated[hidden] == f"{hidden}[{width}] float32"
    assert str(SlotTensor(name="n", shape=(), dtype=torch.int64)) == "n[1] int64"


def test_c065_a_prefill_without_the_draft_is_noticed(world: World, pairs: list[Pair]) -> None:
    """Were the handshake skipped, the state that is missing would be named."""
    pair = make_pair(
        world,
        prefill_overrides={"proposer": "none", "num_speculative_tokens": 0},
        **EAGLE3,
    )
    pairs.append(pair)
    pair.decode.add_request(request_for("a", prompt_of(1, 12)))
    (delta,) = finish(pair)
    assert delta.error is not None
    assert delta.error.code in {"SD867", "SD862"}
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("share", [0, 1, 4])
def test_kv_of_another_size_is_no_kv(world: World, pairs: list[Pair], share: int) -> None:
    """A rank that wrote nothing, or twice: the request ends, and its blocks are free."""
    pair = make_pair(world, **EAGLE3)
    pairs.append(pair)

    def change(frame: Frame) -> Frame:
        if not isinstance(frame, Prefilled):
            return frame
        return msgspec.structs.replace(frame, num_kv_bytes=frame.num_kv_bytes * share // 2)

    pair.wire.change = change
    pair.decode.add_request(request_for("a", prompt_of(1, 9)))
    (delta,) = finish(pair)
    assert delta.error is not None
    assert (delta.error.code, delta.error.where) == ("SD872", "request=a")
    pair.assert_nothing_is_held()
