"""Blocks are conserved under any traffic, and a cached prefix is always the right one."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from runtime.engine.block_manager import BlockManager, BlockTable

SIZE = 4
NUM_BLOCKS = 12
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


class Traffic(RuleBasedStateMachine):
    """Requests come, grow, compute, are freed; memory is modelled as what was written to it."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(
            num_blocks=NUM_BLOCKS,
            kv_block_size=SIZE,
            num_lookahead_tokens=self.num_lookahead_tokens,
            enable_prefix_cache=True,
        )
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.written: dict[int, tuple[int, ...]] = {}  # block -> tokens that its KV depends on

    num_lookahead_tokens = 1

    @rule(target=requests, ids=TOKENS, extra=st.integers(0, 5))
    def allocate(self, ids: list[int], extra: int) -> object:
        free_before = self.manager.num_free_blocks
        table = self.manager.allocate(ids, num_slots=len(ids) + extra)
        if table is None:
            assert self.manager.num_free_blocks == free_before
            assert self.manager.num_blocks_for(len(ids) + extra) > 0
            return multiple()
        assert len(table.blocks) == self.manager.num_blocks_for(len(ids) + extra)
        assert len(set(table.blocks)) == len(table.blocks)
        assert table.num_cached_tokens < len(ids), "one token is always computed again"
        for index in range(table.num_cached_tokens // SIZE):
            end = (index + 1) * SIZE + self.num_lookahead_tokens
            assert self.written[table.blocks[index]] == tuple(ids[:end])
        entry = (table, ids)
        self.live.append(entry)
        return entry

    @rule(request=requests, tokens=TOKENS)
    def compute(self, request: tuple[BlockTable, list[int]], tokens: list[int]) -> None:
        """Write KV of every position but the newest token's, then name full blocks."""
        table, ids = request
        if not table.blocks:
            return
        if self.manager.extend(table, num_slots=len(ids) + len(tokens)):
            ids.extend(tokens)
        num_computed = len(ids) - 1
        for index in range(table.num_cached_tokens // SIZE, num_computed // SIZE):
            end = (index + 1) * SIZE + self.num_lookahead_tokens
            if index >= len(table.keys):
                self.written[table.blocks[index]] = tuple(ids[:end])
        self.manager.commit(table, ids, num_computed_tokens=num_computed)

    @rule(request=requests, num_slots=st.integers(1, 60))
    def extend(self, request: tuple[BlockTable, list[int]], num_slots: int) -> None:
        table, _ = request
        if not table.blocks:
            return
        before, free = list(table.blocks), self.manager.num_free_blocks
        wanted = max(0, self.manager.num_blocks_for(num_slots) - len(before))
        assert self.manager.extend(table, num_slots=num_slots) == (wanted <= free)
        assert table.blocks[: len(before)] == before
        assert self.manager.num_free_blocks == (free - wanted if wanted <= free else free)

    @rule(request=consumes(requests))
    def free(self, request: tuple[BlockTable, list[int]]) -> None:
        self.manager.free(request[0])
        self.live[:] = [entry for entry in self.live if entry[0] is not request[0]]

    @rule()
    def flush(self) -> None:
        self.manager.flush()
        assert self.manager.num_cached_blocks == 0

    @invariant()
    def blocks_are_conserved(self) -> None:
        tables = [entry[0] for entry in self.live]
        self.manager.check(tables)
        held = {block for table in tables for block in table.blocks}
        assert len(held) + self.manager.num_free_blocks == self.manager.num_usable_blocks


class TrafficWithoutLookahead(Traffic):
    num_lookahead_tokens = 0


_SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTraffic = Traffic.TestCase
TestTraffic.settings = _SETTINGS
TestTrafficWithoutLookahead = TrafficWithoutLookahead.TestCase
TestTrafficWithoutLookahead.settings = _SETTINGS


def _manager(*, num_blocks: int = 6, lookahead: int = 1, has_cache: bool = True) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks,
        kv_block_size=SIZE,
        num_lookahead_tokens=lookahead,
        enable_prefix_cache=has_cache,
    )


def _run(manager: BlockManager, ids: list[int]) -> list[int]:
    """Allocate, compute and free a request; return its blocks."""
    table = manager.allocate(ids, num_slots=len(ids))
    assert table is not None
    blocks = list(table.blocks)
    manager.commit(table, ids, num_computed_tokens=len(ids))
    manager.free(table)
    return blocks


def test_the_token_after_a_block_is_part_of_its_key() -> None:
    for lookahead, num_cached in ((1, 0), (0, SIZE)):
        manager = _manager(lookahead=lookahead)
        _run(manager, [1, 2, 3, 4, 5])
        table = manager.allocate([1, 2, 3, 4, 6], num_slots=5)
        assert table is not None
        assert table.num_cached_tokens == num_cached


def test_one_token_is_always_computed_again() -> None:
    manager = _manager(lookahead=0)
    _run(manager, [1, 2, 3, 4])
    for ids, num_cached in (([1, 2, 3, 4], 0), ([1, 2, 3, 4, 5], SIZE)):
        table = manager.allocate(ids, num_slots=len(ids))
        assert table is not None
        assert table.num_cached_tokens == num_cached
        manager.free(table)


def test_idle_blocks_are_reused_before_cached_ones_and_tails_before_heads() -> None:
    manager = _manager(num_blocks=5)
    cached = _run(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.num_cached_blocks == 2
    fresh = manager.allocate([7], num_slots=2 * SIZE)
    assert fresh is not None
    assert not set(fresh.blocks) & set(cached[:2])
    assert manager.extend(fresh, num_slots=3 * SIZE)
    assert fresh.blocks[-1] == cached[1], "the deeper block goes first"
    hit = manager.allocate([1, 2, 3, 4, 5], num_slots=4)
    assert hit is not None
    assert hit.blocks == cached[:1]


def test_a_block_without_a_name_is_reused_before_a_named_one_freed_earlier() -> None:
    manager = _manager(num_blocks=4)
    nameless = manager.allocate([7], num_slots=1)
    assert nameless is not None
    idle = nameless.blocks[0]
    _run(manager, [1, 2, 3, 4, 5])
    manager.free(nameless)
    fresh = manager.allocate([8], num_slots=1)
    assert fresh is not None
    assert fresh.blocks == [idle]


def test_a_held_prefix_is_shared_and_counts_once() -> None:
    manager = _manager()
    ids = [1, 2, 3, 4, 5]
    first = manager.allocate(ids, num_slots=5)
    assert first is not None
    manager.commit(first, ids, num_computed_tokens=4)
    second = manager.allocate(ids, num_slots=5)
    assert second is not None
    assert second.blocks[0] == first.blocks[0]
    assert manager.num_free_blocks == 2
    manager.free(first)
    assert manager.num_free_blocks == 3
    manager.check([second])


def test_a_disabled_cache_finds_nothing() -> None:
    manager = _manager(has_cache=False)
    _run(manager, [1, 2, 3, 4, 5])
    table = manager.allocate([1, 2, 3, 4, 5], num_slots=5)
    assert table is not None
    assert table.num_cached_tokens == 0
