"""Several decode servers of one prefill server: idle ones, busy ones, one that leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runtime.disagg.frames import unreachable
from runtime.disagg.listen import Left
from runtime.disagg.memory import MemoryTransport
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.request import RequestInput
from runtime.kv import KVLayer
from tests.engine_harness import World, prompt_of, reference_ids
from tests.fake_graph import make_agreeing_world
from tests.pd_gate import Gate, GatedTransport
from tests.pd_harness import Pair, make_pair, request_for, second_decode

EAGLE3 = {"proposer": "eagle3", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_agreeing_world(tmp_path_factory.mktemp("peers"))


def run(
    pair: Pair, engines: Sequence[DecodeEngine], *, steps: int = 20_000
) -> dict[str, list[int]]:
    """Step the prefill server and all decode servers in turn until all are done."""
    ids: dict[str, list[int]] = {}
    for _ in range(steps):
        pair.prefill.step()
        for engine in engines:
            for delta in engine.step():
                assert delta.error is None, delta.error
                ids.setdefault(delta.request_id, []).extend(delta.ids_target)
        if not (pair.prefill.has_work or any(engine.has_work for engine in engines)):
            return ids
    return ids


def assert_all_right(
    world: World, found: dict[str, list[int]], asked: Sequence[RequestInput]
) -> None:
    assert {name: tuple(ids) for name, ids in found.items()} == {
        item.request_id: reference_ids(world, item) for item in asked
    }


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_c069_one_request_beside_an_idle_server(world: World, gamma: int) -> None:
    """An idle decode server takes part in nothing and holds nothing up."""
    transport = MemoryTransport()
    pair = make_pair(world, transport=transport, proposer="eagle3", num_speculative_tokens=gamma)
    idle, _ = second_decode(world, pair, transport)
    asked = request_for("a", prompt_of(gamma, 9), max_tokens=3)
    pair.decode.add_request(asked)
    assert_all_right(world, run(pair, [pair.decode, idle], steps=300), [asked])
    assert not pair.decode.has_work
    pair.close()


def test_two_busy_servers(world: World) -> None:
    transport = MemoryTransport()
    pair = make_pair(world, transport=transport, **EAGLE3)
    other, wire = second_decode(world, pair, transport)
    asked = [request_for(f"r{n}", prompt_of(n, 3 + 6 * n)) for n in range(6)]
    for index, item in enumerate(asked):
        (pair.decode, other)[index % 2].add_request(item)
    assert_all_right(world, run(pair, [pair.decode, other]), asked)
    assert len(wire.answered) == len(pair.wire.answered) == 3
    pair.assert_nothing_is_held()
    pair.close()


class FirstGated(GatedTransport):
    """Only writes to the pool that was offered first wait."""

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> Any:
        if address == b"0":
            return super().connect(address, layers)
        return MemoryTransport.connect(self, address, layers)


def test_a_carrier_that_stands_still_holds_up_no_other_server(world: World) -> None:
    """As on a network that is cut: a write returns after half a minute, if at all."""
    gate = Gate()
    transport = FirstGated(gate)
    pair = make_pair(world, transport=transport, **EAGLE3)
    other, _ = second_decode(world, pair, transport)
    stuck, asked = request_for("a", prompt_of(1, 20)), request_for("b", prompt_of(2, 17))
    pair.decode.add_request(stuck)
    for _ in range(4):
        pair.prefill.step()
        pair.decode.step()
    other.add_request(asked)
    ids: list[int] = []
    for _ in range(3000):
        pair.prefill.step()
        ids += [token for delta in other.step() for token in delta.ids_target]
        if not other.has_work:
            break
    assert tuple(ids) == reference_ids(world, asked)
    assert gate.writes == 0
    gate.is_open.set()
    assert_all_right(world, run(pair, [pair.decode, other]), [stuck])
    pair.close()


def test_a_server_that_leaves_in_mid_transfer(world: World) -> None:
    """Its prompts are dropped, its blocks freed, its links closed; the other one is served."""
    gate = Gate()
    transport = GatedTransport(gate)
    pair = make_pair(world, transport=transport, **EAGLE3)
    leaving, wire = second_decode(world, pair, transport)
    leaving.add_request(request_for("gone", prompt_of(1, 30)))
    run(pair, [leaving], steps=4)
    assert wire.asked
    wire.is_writable = False
    pair.wire.to_prefill.append(Left(peer="d1", problem=unreachable("d1", "gone")))
    asked = [request_for("a", prompt_of(2, 20)), request_for("b", prompt_of(3, 11))]
    for item in asked:
        pair.decode.add_request(item)
    run(pair, [pair.decode], steps=6)
    gate.is_open.set()
    assert_all_right(world, run(pair, [pair.decode]), asked)
    pair.assert_nothing_is_held()
    pair.close()
