"""KV leaves while the prompt is computed, and no block before its kernels are over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.disagg.memory import MemoryLink, MemoryTransport
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer
from tests.engine_harness import World, prompt_of, reference_ids
from tests.fake_graph import make_agreeing_world
from tests.pd_harness import Pair, make_pair, pump, request_for
from tests.slow_pool import SlowPool
from tests.tiny_last_state import last_state_world

SETTINGS = {"num_speculative_tokens": 4}


class NotedTransport(MemoryTransport):
    """Notes the order of writes."""

    def __init__(self, *, is_ordered: bool) -> None:
        super().__init__()
        self.moves: list[BlockMove] = []
        self._is_ordered = is_ordered

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> NotedLink:  # type: ignore[override]
        return NotedLink(super().connect(address, layers), self.moves, self._is_ordered)


class NotedLink:
    def __init__(self, link: MemoryLink, moves: list[BlockMove], is_ordered: bool) -> None:
        self._link, self._moves, self.is_ordered = link, moves, is_ordered
        self.finish, self.close = link.finish, link.close

    def write(self, move: BlockMove) -> None:
        self._moves.append(move)
        self._link.write(move)


@pytest.fixture(scope="module", params=["eagle3", "mtp-layers"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("early")
    if request.param == "eagle3":
        return make_agreeing_world(folder)
    return last_state_world(folder, "mtp", num_layers=3)


def slow_pair(
    world: World, *, is_waited: bool, chunk: int, is_ordered: bool = False
) -> tuple[Pair, SlowPool, NotedTransport]:
    assert world.manifest.draft is not None
    slow, transport = SlowPool(is_waited=is_waited), NotedTransport(is_ordered=is_ordered)
    pair = make_pair(
        world,
        transport=transport,
        mark_end=slow.mark,
        prefill_overrides={"prefill_chunk_size": chunk, "num_speculative_tokens": 3},
        proposer=world.manifest.draft.algorithm,
        num_speculative_tokens=3,
    )
    slow.sender = pair.sender
    slow.watch(pair.caches["prefill"].pool.layers)
    return pair, slow, transport


def compute(pair: Pair, slow: SlowPool) -> None:
    """Run the prefill side until it has answered."""
    pair.decode.step()
    for _ in range(2000):
        pair.prefill.step()
        slow.settle()
        if pair.wire.answered:
            return
    raise AssertionError("no answer came")


@pytest.mark.parametrize(("chunk", "is_ordered"), [(64, False), (11, False), (11, True)])
def test_no_block_is_torn_on_the_engine_s_path(world: World, chunk: int, is_ordered: bool) -> None:
    pair, slow, transport = slow_pair(world, is_waited=True, chunk=chunk, is_ordered=is_ordered)
    asked = request_for("a", prompt_of(1, 29))
    pair.decode.add_request(asked)
    compute(pair, slow)
    pool = pair.caches["decode"].pool.layers
    assert not any(item.isnan().any() for layer in pool for item in (layer.k, layer.v))
    ids: list[int] = []
    while not pair.is_idle():
        ids += [token for delta in pump(pair) for token in delta.ids_target]
    assert tuple(ids) == reference_ids(world, asked)
    assert_each_block_once(transport, num_layers=len(pool), num_blocks=4)
    pair.close()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_without_the_wait_blocks_are_torn(world: World, is_ordered: bool) -> None:
    """The mutant: marks that are thought to be over."""
    pair, slow, _ = slow_pair(world, is_waited=False, chunk=64, is_ordered=is_ordered)
    pair.decode.add_request(request_for("a", prompt_of(1, 29)))
    compute(pair, slow)
    pool = pair.caches["decode"].pool.layers
    assert any(item.isnan().any() for layer in pool for item in (layer.k, layer.v))
    pair.close()


def assert_each_block_once(transport: NotedTransport, *, num_layers: int, num_blocks: int) -> None:
    sent: dict[int, list[int]] = {}
    for move in transport.moves:
        sent.setdefault(move.destination_layer, []).extend(move.destination_blocks)
    assert sorted(sent) == list(range(num_layers))
    for blocks in sent.values():
        assert len(blocks) == len(set(blocks)) == num_blocks


def test_layers_leave_in_order_while_the_prompt_is_computed(world: World) -> None:
    """A chunk's whole blocks have left before the next chunk is computed, the rest at the end."""
    pair, slow, transport = slow_pair(world, is_waited=True, chunk=12)
    pair.decode.add_request(request_for("a", prompt_of(1, 29)))
    num_target = pair.caches["prefill"].num_target_layers
    compute(pair, slow)
    found = [
        (move.source_layer, len(move.source_blocks))
        for move in transport.moves
        if move.source_layer < num_target
    ]
    layers = list(range(num_target))
    assert found == [
        *((layer, 1) for layer in layers),  # 12 positions: one whole block of 8
        *((layer, 2) for layer in layers),  # 24: two more
        *((layer, 1) for layer in layers),  # 29: the last one, which is not full
    ]
    pair.close()
