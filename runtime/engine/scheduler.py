"""What runs next: decode rounds and prefill chunks share one row budget.

Policy: running requests decode first, oldest first, num_drafts + 1 rows each; what is left of the
budget goes to prefill chunks, then to admissions in arrival order. When KV blocks run out, drafts
are given up before work is: a round shrinks its drafts, then the youngest running request is
preempted, which frees its blocks and puts it at the head of the queue.
A request whose prompt is computed elsewhere is *reserved*: it has a slot and blocks, and neither
runs nor is preempted until its KV is there.
Exactness: preemption is free + recompute. Positions made by decode are prefilled again, which
yields the same bits because every row takes the same arithmetic whatever batch it is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.config import RuntimeConfig
from runtime.engine.block_manager import BlockManager
from runtime.engine.request import Placement, Request
from runtime.spec.adaptive import Candidate, Choice, DraftLengths, StaticLengths
from runtime.spec.types import Proposer


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeWork:
    """One round of a request: up to `num_drafts` drafts and the bonus token.

    Args:
        max_accepted: drafts that may be accepted; fewer than drafts under `cap-accept` only.
    """

    request: Request
    num_drafts: int
    max_accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillWork:
    """Rows `start .. start + num_rows - 1` of a request; the last chunk yields a token."""

    request: Request
    start: int
    num_rows: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk reaches the newest token."""
        return self.start + self.num_rows == self.request.placed.num_prefill_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The work of one step; each request appears once.

    Args:
        admitted: requests of `prefills` that start for the first time.
    """

    decodes: tuple[DecodeWork, ...]
    prefills: tuple[PrefillWork, ...]
    admitted: tuple[Request, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests in row order: decodes, then prefills."""
        decoding = tuple(work.request for work in self.decodes)
        return decoding + tuple(work.request for work in self.prefills)

    def without(self, requests: tuple[Request, ...]) -> Plan:
        """Return the plan with some requests left out."""
        return Plan(
            decodes=tuple(work for work in self.decodes if work.request not in requests),
            prefills=tuple(work for work in self.prefills if work.request not in requests),
            admitted=self.admitted,
        )


class Scheduler:
    """Queues, slots and the row budget; KV blocks are the block manager's."""

    def __init__(
        self,
        config: RuntimeConfig,
        blocks: BlockManager,
        proposer: Proposer,
        lengths: DraftLengths | None = None,
    ) -> None:
        """Start empty; without `lengths` every request gets the drafts that it wants."""
        self._lengths = lengths or StaticLengths()
        self._config = config
        self._blocks = blocks
        self._proposer = proposer
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest admission first
        self._reserved: list[Request] = []
        self._free_slots = list(range(config.max_num_requests))
        self._refused: tuple[Request, int] | None = None  # by lack of blocks; how many were free
        self.num_preemptions = 0
        self.version = 0  # changes whenever the running requests do

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests with a slot, oldest admission first."""
        return tuple(self._running)

    @property
    def has_runnable(self) -> bool:
        """Whether `schedule` has anything to choose from."""
        return bool(self._running or self._waiting)

    @property
    def placed(self) -> tuple[Request, ...]:
        """Requests with a slot, reserved ones last."""
        return (*self._running, *self._reserved)

    @property
    def may_admit(self) -> bool:
        """Whether `schedule` might start a waiting request.

        One that was refused for lack of blocks is tried again when more blocks are free.
        """
        if not self._waiting or not self._free_slots:
            return False
        if self._refused is None or self._refused[0] is not self._waiting[0]:
            return True
        return self._blocks.num_free_blocks > self._refused[1]

    def __iter__(self) -> Iterator[Request]:
        """Iterate over every request in flight."""
        return iter((*self._running, *self._reserved, *self._waiting))

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Let go of a request, running or waiting, and of everything it holds."""
        if request.placement is None:
            self._waiting.remove(request)
        else:
            self._leave(request)

    def reserve(self, request: Request) -> bool:
        """Give a new request a slot and blocks without running it; False where there is no room.

        Requests that wait come first: they hold places in the order of their arrival.
        """
        if self._waiting or not self._place(request):
            return False
        request.num_cached_tokens = request.placed.table.num_cached_tokens
        self._reserved.append(request)
        return True

    def resume(self, request: Request) -> None:
        """Run a reserved request: its KV is there."""
        self._reserved.remove(request)
        self._running.append(request)
        self.version += 1

    def park(self, request: Request) -> None:
        """Keep slot and blocks of a running request without running it any more."""
        self._running.remove(request)
        self._reserved.append(request)
        self.version += 1

    def schedule(self, *, num_parts: int = 1) -> Plan:
        """Choose the work of the next step; admits and preempts.

        Args:
            num_parts: forwards that are to be under way at once: decoding requests are spread over
                so many plans. Requests whose rows are under way are left alone.
        """
        decodes, budget = self._plan_decodes(self._config.max_num_batched_tokens, num_parts)
        prefills = []
        for request in self._running:
            if request.placed.is_under_way:
                continue
            if budget and request.placed.num_tokens_to_prefill:
                prefills.append(self._chunk(request, budget))
                budget -= prefills[-1].num_rows
        prefills += self._newcomers(budget)
        return replace(self.plan_prefills(prefills), decodes=tuple(decodes))

    def newcomers(self) -> tuple[PrefillWork, ...]:
        """Start waiting requests while others run rounds; `plan_prefills` makes a plan of them.

        Those that get none are planned by `schedule`, as chunks of running requests.
        """
        return tuple(self._newcomers(self._config.max_num_batched_tokens))

    def plan_prefills(self, works: Sequence[PrefillWork]) -> Plan:
        """Return a plan of these prompts alone."""
        admitted = tuple(work.request for work in works if work.request.num_cached_tokens is None)
        for request in admitted:
            request.num_cached_tokens = request.placed.table.num_cached_tokens
        return Plan(decodes=(), prefills=tuple(works), admitted=admitted)

    def _newcomers(self, budget: int) -> Iterator[PrefillWork]:
        while budget and (newcomer := self._admit()) is not None:
            work = self._chunk(newcomer, budget)
            budget -= work.num_rows
            yield work

    def _plan_decodes(self, budget: int, num_parts: int) -> tuple[list[DecodeWork], int]:
        decodes = []
        decoding = [request for request in self._running if request.placed.is_decoding]
        share = -(-len(decoding) // num_parts)
        pending = [request for request in decoding if not request.placed.is_under_way][:share]
        limits = [self.wanted_drafts(request) for request in pending]
        chosen = self.choose_drafts(pending, limits).num_drafts
        wanted = limits if self._config.length_mode == "cap-accept" else chosen
        for index, request in enumerate(pending):
            if request.placement is None:  # preempted for an older one
                continue
            rows_for_later = len(pending) - index - 1
            num_drafts = min(wanted[index], budget - rows_for_later - 1)
            granted = self._grow(request, num_drafts)
            if granted is not None:
                cap = min(granted, chosen[index])
                decodes.append(DecodeWork(request=request, num_drafts=granted, max_accepted=cap))
                budget -= granted + 1
        return decodes, budget

    def choose_drafts(self, requests: Sequence[Request], limits: Sequence[int]) -> Choice:
        """Return the drafts of a round of these requests, each at most its limit."""
        return self._lengths.choose(
            [
                Candidate(acceptance=request.acceptance, limit=limit)
                for request, limit in zip(requests, limits, strict=True)
            ]
        )

    def wanted_drafts(self, request: Request) -> int:
        """Return how many drafts a round of the request has at most.

        Not limited by `max_tokens`: accept length counts drafts before any length cut.
        """
        room = self._config.max_model_len - len(request.ids_target) - 1
        limit = min(request.num_speculative_tokens, room)
        return self._proposer.max_drafts(request.view(limit)) if limit > 0 else 0

    def _grow(self, request: Request, num_drafts: int) -> int | None:
        """Give a request the blocks of its round; returns its drafts, None if it was preempted."""
        placed = request.placed
        while True:
            num_slots = placed.num_computed_tokens + num_drafts + 1
            if self._blocks.extend(placed.table, num_slots=num_slots):
                return num_drafts
            num_blocks = len(placed.table.blocks) + self._blocks.num_free_blocks
            fitting = num_blocks * self._blocks.kv_block_size - placed.num_computed_tokens - 1
            if 0 <= fitting < num_drafts:
                num_drafts = fitting
                continue
            num_drafts = 0
            victim = next(item for item in reversed(self._running) if not item.placed.is_under_way)
            self.preempt(victim)
            if victim is request:
                return None

    def preempt(self, request: Request) -> None:
        """Free what a running request holds and put it at the head of the queue."""
        self._leave(request)
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _leave(self, request: Request) -> None:
        placed = request.placed
        (self._reserved if request in self._reserved else self._running).remove(request)
        self.version += 1
        self._proposer.release(placed.slot)
        self._blocks.free(placed.table)
        self._free_slots.append(placed.slot)
        request.placement = None

    def _admit(self) -> Request | None:
        """Start the first waiting request if a slot and its blocks are free."""
        if not self._waiting or not self._free_slots:
            return None
        request = self._waiting[0]
        if not self._place(request):
            self._refused = (request, self._blocks.num_free_blocks)
            return None
        self._refused = None
        self._waiting.popleft()
        self._running.append(request)
        self.version += 1
        return request

    def _place(self, request: Request) -> bool:
        """Give a request a slot and blocks if there are any."""
        if not self._free_slots:
            return False
        num_tokens = len(request.ids_target)
        # Room for the first round's drafts too: admission should not end in preemption.
        num_slots = num_tokens + request.num_speculative_tokens + 1
        table = self._blocks.allocate(
            request.ids_target, num_slots=min(num_slots, self._config.max_model_len)
        )
        if table is None:
            return False
        request.placement = Placement(
            slot=self._free_slots.pop(),
            table=table,
            num_computed_tokens=table.num_cached_tokens,
            num_prefill_tokens=num_tokens,
        )
        return True

    def _chunk(self, request: Request, budget: int) -> PrefillWork:
        placed = request.placed
        return PrefillWork(
            request=request,
            start=placed.num_computed_tokens,
            num_rows=min(placed.num_tokens_to_prefill, self._config.prefill_chunk_size, budget),
        )
