"""Paged-KV bookkeeping: which request holds which block, and which full blocks may be used again.

A block is *cached* when its keys and values are final and named by a key: a hash chain over the
parent's key, the block's tokens and the `num_lookahead_tokens` tokens after it (the draft's KV at
position p depends on the token at p + 1, so equal blocks with different successors are different).
Invariants (`check` asserts them): every block but `PADDING_BLOCK` is either free or referenced, its
count equals its occurrences in live tables, keys and cached blocks are a bijection. Memory is never
touched here: only names change.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PADDING_BLOCK = 0
"""Never handed out: pads block tables, and padding rows of captured graphs write to it."""

_ROOT_KEY = b""


@dataclass(kw_only=True, slots=True)
class BlockTable:
    """Blocks of one running request in position order; only the block manager changes it.

    Args:
        blocks: block ids; position p lives in `blocks[p // kv_block_size]`.
        num_cached_tokens: leading positions whose KV was found in the prefix cache.
        keys: chain keys of the leading full blocks whose KV is final.
    """

    blocks: list[int]
    num_cached_tokens: int
    keys: list[bytes] = field(default_factory=list)


class BlockManager:
    """Hands out blocks, counts references and finds cached prefixes."""

    def __init__(
        self,
        *,
        num_blocks: int,
        kv_block_size: int,
        num_lookahead_tokens: int,
        enable_prefix_cache: bool,
    ) -> None:
        """Start with every block free and nothing cached; `num_blocks` counts the padding block."""
        assert num_blocks > 1, f"a pool of {num_blocks} blocks has none to hand out"
        self.num_blocks = num_blocks
        self.kv_block_size = kv_block_size
        self._num_lookahead_tokens = num_lookahead_tokens
        self._is_caching = enable_prefix_cache
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict()  # first out first; cached ones last
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        for block in range(1, num_blocks):
            self._free[block] = None

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a later prompt could find, held ones included."""
        return len(self._key_of_block)

    def num_blocks_for(self, num_slots: int) -> int:
        """Return how many blocks hold that many positions."""
        return -(-num_slots // self.kv_block_size)

    def allocate(self, ids_target: Sequence[int], *, num_slots: int) -> BlockTable | None:
        """Return a table for positions 0..num_slots - 1, cached prefix first; None if none is free.

        At least one of the tokens is left to compute, because its row yields the next token.
        """
        keys = self._match(ids_target)
        hits = [self._block_of_key[key] for key in keys]
        num_fresh = self.num_blocks_for(num_slots) - len(hits)
        num_idle_hits = sum(self._num_references[block] == 0 for block in hits)
        if num_fresh > self.num_free_blocks - num_idle_hits:
            return None
        for block in hits:
            self._free.pop(block, None)
            self._num_references[block] += 1
        return BlockTable(
            blocks=hits + [self._take() for _ in range(num_fresh)],
            num_cached_tokens=len(hits) * self.kv_block_size,
            keys=keys,
        )

    def extend(self, table: BlockTable, *, num_slots: int) -> bool:
        """Grow a table to hold `num_slots` positions; False, and no change, if blocks run out."""
        num_fresh = self.num_blocks_for(num_slots) - len(table.blocks)
        if num_fresh > self.num_free_blocks:
            return False
        table.blocks.extend(self._take() for _ in range(num_fresh))
        return True

    def commit(
        self, table: BlockTable, ids_target: Sequence[int], *, num_computed_tokens: int
    ) -> None:
        """Make full blocks findable whose target and draft KV is final.

        Args:
            table: the request's blocks.
            ids_target: its tokens as committed; nothing after a stop.
            num_computed_tokens: leading positions whose target KV is final.
        """
        if not self._is_caching:
            return
        size = self.kv_block_size
        # A draft that looks k tokens ahead has its last keys and values k - 1 positions behind.
        num_final_tokens = num_computed_tokens - max(0, self._num_lookahead_tokens - 1)
        for index in range(len(table.keys), num_final_tokens // size):
            if not self._is_nameable(index, len(ids_target)):
                return
            key = self._key(table.keys[-1] if table.keys else _ROOT_KEY, ids_target, index)
            table.keys.append(key)
            if key not in self._block_of_key:  # else another request computed the same block first
                self._block_of_key[key] = table.blocks[index]
                self._key_of_block[table.blocks[index]] = key

    def free(self, table: BlockTable) -> None:
        """Give a table's blocks back; cached ones stay findable until they are needed."""
        for block in reversed(table.blocks):  # a tail is reused before the prefix it hangs on
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} was freed twice"
            if self._num_references[block] == 0:
                self._free[block] = None
                if block not in self._key_of_block:
                    self._free.move_to_end(block, last=False)
        table.blocks.clear()
        table.keys.clear()

    def share(self, table: BlockTable) -> BlockTable:
        """Return a second table of the same blocks; they stay until both are freed."""
        for block in table.blocks:
            self._num_references[block] += 1
        return BlockTable(
            blocks=list(table.blocks),
            num_cached_tokens=table.num_cached_tokens,
            keys=list(table.keys),
        )

    def flush(self) -> None:
        """Forget every cached prefix; blocks in use stay in use, memory stays where it is."""
        self._block_of_key.clear()
        self._key_of_block.clear()

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert the invariants of the module, given every live table."""
        held = Counter(block for table in tables for block in table.blocks)
        assert PADDING_BLOCK not in held, "the padding block is in a table"
        assert PADDING_BLOCK not in self._free, "the padding block is free"
        for block in range(1, self.num_blocks):
            found, counted = held[block], self._num_references[block]
            assert found == counted, f"block {block} is in {found} tables but counted {counted}"
            assert (counted == 0) == (block in self._free), (
                f"block {block} is neither free nor held"
            )
        inverse = {block: key for key, block in self._block_of_key.items()}
        assert inverse == self._key_of_block, "keys and cached blocks are not a bijection"

    def _match(self, ids_target: Sequence[int]) -> list[bytes]:
        """Return the chain keys of the longest cached prefix that leaves one token to compute."""
        keys: list[bytes] = []
        if not self._is_caching:
            return keys
        for index in range((len(ids_target) - 1) // self.kv_block_size):
            if not self._is_nameable(index, len(ids_target)):
                break
            key = self._key(keys[-1] if keys else _ROOT_KEY, ids_target, index)
            if key not in self._block_of_key:
                break
            keys.append(key)
        return keys

    def _is_nameable(self, index: int, num_tokens: int) -> bool:
        """Tell whether all tokens that the block's key depends on are known."""
        return (index + 1) * self.kv_block_size + self._num_lookahead_tokens <= num_tokens

    def _key(self, parent: bytes, ids_target: Sequence[int], index: int) -> bytes:
        start = index * self.kv_block_size
        end = start + self.kv_block_size + self._num_lookahead_tokens
        return hashlib.sha256(parent + array("q", ids_target[start:end]).tobytes()).digest()

    def _take(self) -> int:
        """Take the free block that was idle longest; what it cached is forgotten."""
        block, _ = self._free.popitem(last=False)
        key = self._key_of_block.pop(block, None)
        if key is not None:
            del self._block_of_key[key]
        self._num_references[block] = 1
        return block
