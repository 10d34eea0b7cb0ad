"""Requests whose prompt is computed in another process, on either side of the hand-over.

On the decode side a request is *reserved*: it has a slot and blocks and waits for KV, then `take`
makes it a running one. On the prefill side a request that got its first token is *parked*: it keeps
slot and blocks until its KV has left. Blocks that another process may still read or write are
*held* under a name after their request is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from runtime.engine.block_manager import BlockManager, BlockTable
from runtime.engine.request import Request
from runtime.engine.scheduler import Scheduler
from runtime.spec.received import ReceivedDrafts
from runtime.spec.types import Proposer, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """What another process computed for a reserved request.

    Args:
        committed: target ids that the prefill yielded.
        state: of the proposer, on the engine's device; see `Proposer.import_slot`.
        received: drafts of the first round; None: they are made here.
        num_cached_tokens: prompt tokens that the other process had in its prefix cache.
        logprobs: of the committed tokens, where the request wants them.
    """

    committed: tuple[int, ...]
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    received: ReceivedDrafts | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Handover:
    """The part of an engine that gives requests away and takes them over."""

    def __init__(self, *, scheduler: Scheduler, blocks: BlockManager, proposer: Proposer) -> None:
        """Hold nothing; the parts are the engine's own."""
        self._scheduler = scheduler
        self._blocks = blocks
        self._proposer = proposer
        self._held: dict[str, BlockTable] = {}

    @property
    def is_holding(self) -> bool:
        """Whether blocks are held, by a reserved or parked request or after one."""
        return bool(self._held) or len(self._scheduler.placed) > self._scheduler.num_running

    @property
    def held_tables(self) -> Iterable[BlockTable]:
        """Tables of requests that are gone."""
        return self._held.values()

    def in_slot(self, slot: int) -> Request:
        """Return the request that has a slot."""
        return next(item for item in self._scheduler.placed if item.placed.slot == slot)

    def take(self, request: Request, arrival: Arrival) -> None:
        """Run a reserved request whose KV and first token are there.

        Args:
            request: the first token among its tokens.
            arrival: what came with the KV.
        """
        request.num_cached_tokens = max(request.num_cached_tokens or 0, arrival.num_cached_tokens)
        request.placed.received = arrival.received
        self._proposer.import_slot(request.view(0), arrival.state)
        self._scheduler.resume(request)

    def hold(self, request: Request, name: str) -> None:
        """Keep a request's blocks from being used again until `release`, whatever becomes of it."""
        assert name not in self._held, f"{name} is held already"
        self._held[name] = self._blocks.share(request.placed.table)

    def release(self, name: str) -> None:
        """Let blocks go that were held; nothing happens to a name that holds none."""
        table = self._held.pop(name, None)
        if table is not None:
            self._blocks.free(table)
