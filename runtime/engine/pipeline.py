"""Rounds that run on the device one ahead of what the host has read.

A round is launched while the one before it is unread, so the host knows only bounds: after p unread
rounds of W rows a request has at most p W tokens more. Launching needs room, blocks and draft
positions for that bound. A request that turns out to have ended loses its later tokens, which no
one read. Whatever does not fit (prefill, general options, the end of a context, lack of blocks)
drains the pipeline, and the eager path goes on from the same state with the same bits.

Invariants: at most NUM_BUFFERS rounds are unread; only the eager path adds requests, with nothing
unread; device state is ahead of the host's by the unread rounds exactly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from runtime.batch import RoundKind
from runtime.config import RuntimeConfig
from runtime.config.round_sizes import smallest_fit
from runtime.engine.block_manager import BlockManager
from runtime.engine.request import Placement, Request
from runtime.engine.scheduler import Scheduler
from runtime.engine.slot_params import round_kind, slot_sampling
from runtime.graphs.capture import NUM_BUFFERS, GraphReport
from runtime.graphs.round import DeviceRound, RoundRunner
from runtime.graphs.state import RoundShape, RoundState, SlotRow
from runtime.spec.types import DeviceProposer


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRounds:
    """What an engine runs rounds on the device with.

    Args:
        runner: runs rounds over `state`.
        state: of all slots.
        proposer: the engine's own.
        report: what captured graphs cost.
        round_: what the runner runs.
    """

    runner: RoundRunner
    state: RoundState
    proposer: DeviceProposer
    report: GraphReport
    round_: DeviceRound


@dataclass(kw_only=True, slots=True)
class Lane:
    """A request that runs rounds on the device.

    Args:
        placement: what it held when it joined; another one means that it left in between.
        limit: drafts that count in a round at most.
        last_length: tokens with which a round may still start at most.
        num_written_blocks: blocks of its table that the device knows.
    """

    request: Request
    placement: Placement
    limit: int
    last_length: int
    num_written_blocks: int

    @property
    def is_running(self) -> bool:
        """Whether the request still is what the device took it for."""
        return self.request.placement is self.placement


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneResult:
    """What a round yielded for a request, before any stop or length cut.

    Args:
        num_drafts: drafts that counted.
        committed: target ids, accepted drafts then the bonus token.
        confidence: the draft's chances for its drafts; empty without such a head.
    """

    request: Request
    num_drafts: int
    committed: list[int]
    confidence: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """What the next round is to be.

    Args:
        batch: requests, padding included.
        count: drafts that the draft makes for each.
        num_packed_rows: rows of a ragged round; None for a dense one.
        num_drafts: per lane, drafts that count.
    """

    batch: int
    count: int
    num_packed_rows: int | None
    num_drafts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flight:
    """A round that was launched and not read."""

    lanes: tuple[Lane, ...]
    num_drafts: tuple[int, ...]
    shape: RoundShape
    buffer: int


class Pipeline:
    """Launches rounds ahead and reads them in order."""

    def __init__(
        self,
        rounds: DeviceRounds,
        *,
        scheduler: Scheduler,
        blocks: BlockManager,
        config: RuntimeConfig,
    ) -> None:
        """Start with nothing in flight.

        Args:
            rounds: its slots are those of `scheduler`.
            scheduler: who runs.
            blocks: the block manager of `scheduler`.
            config: settings.
        """
        self._runner = rounds.runner
        self._state = rounds.state
        self._proposer = rounds.proposer
        self._scheduler = scheduler
        self._blocks = blocks
        self._config = config
        self._flights: deque[_Flight] = deque()
        self._next_buffer = 0
        self._lanes: tuple[Lane, ...] = ()
        self._seen_version: int | None = None
        self._is_written = False  # device state of all lanes is current
        self._written_drafts: tuple[int, ...] | None = None  # None: the lanes changed since
        self._batch = 0
        self._kind: RoundKind = "greedy"  # of the rounds to come

    def next_results(self) -> list[LaneResult] | None:
        """Keep rounds in flight and return the oldest one's; None: the eager path's turn.

        Requests that ended or left since the launch have no entry. Sync: waits for that round.
        """
        while True:
            while len(self._flights) < NUM_BUFFERS and (size := self._prepare()) is not None:
                self._launch(size)
            if not self._flights:
                self._is_written = False
                self._seen_version = None
                return None
            results = self._read(self._flights.popleft())
            if results:
                return results

    def _read(self, flight: _Flight) -> list[LaneResult]:
        if not any(lane.is_running for lane in flight.lanes):
            return []  # not waited for
        rows = self._runner.read(flight.buffer, len(flight.lanes))
        chances = self._runner.confidence(flight.buffer, len(flight.lanes))
        return [
            LaneResult(
                request=lane.request,
                num_drafts=num_drafts,
                committed=row[1 : row[0] + 2],
                confidence=tuple(confidence[:num_drafts]),
            )
            for lane, num_drafts, row, confidence in zip(
                flight.lanes, flight.num_drafts, rows, chances, strict=True
            )
            if lane.is_running
        ]

    def _prepare(self) -> _Size | None:
        """Make room for one more round; None when it cannot run here or is not needed."""
        if self._scheduler.may_admit:
            return None
        if self._seen_version != self._scheduler.version and not self._join():
            return None
        size = self._choose()
        ahead = 0
        for flight in self._flights:
            ahead += flight.shape.width
        width, block_size = size.count + 1, self._config.kv_block_size
        is_needed = False
        for lane in self._lanes:
            length = len(lane.request.ids_target) + ahead
            if length > lane.last_length:
                return None
            # Every unread round commits one token at least.
            if lane.request.max_length - len(lane.request.ids_target) > len(self._flights):
                is_needed = True
            table, num_slots = lane.placement.table, length + width - 1
            if len(table.blocks) * block_size < num_slots and not self._blocks.extend(
                table, num_slots=num_slots
            ):
                return None
        return size if is_needed else None

    def _choose(self) -> _Size:
        """Choose each lane's drafts from what was read so far, and the size that holds them."""
        choice = self._scheduler.choose_drafts(
            [lane.request for lane in self._lanes], [lane.limit for lane in self._lanes]
        )
        num_drafts = choice.num_drafts
        most, num_rows = max(num_drafts), sum(num_drafts) + len(num_drafts)
        if choice.size is not None and self._config.length_mode == "compact":
            most, num_rows = choice.size.num_drafts, choice.size.num_rows
        count = smallest_fit(self._runner.draft_counts, most)
        assert count is not None, "lanes join within the sizes that are captured"
        is_dense = self._kind == "rejection"
        packed = () if is_dense else self._runner.packed_row_counts(self._batch, count)
        return _Size(
            batch=self._batch,
            count=count,
            num_packed_rows=smallest_fit(packed, num_rows),
            num_drafts=num_drafts,
        )

    def _launch(self, size: _Size) -> None:
        ahead = sum(flight.shape.width for flight in self._flights)
        longest = max(len(lane.request.ids_target) for lane in self._lanes)
        # Rounds that draw are made for the longest context only.
        contexts = self._runner.contexts if self._kind == "greedy" else self._runner.contexts[-1:]
        context = smallest_fit(contexts, longest + ahead + size.count)
        assert context is not None, "`_prepare` keeps rounds within the context"
        shape = RoundShape(
            batch=size.batch,
            num_drafts=size.count,
            context=context,
            num_packed_rows=size.num_packed_rows,
            kind=self._kind,
        )
        self._write(size)
        self._runner.launch(shape, self._next_buffer)
        self._flights.append(
            _Flight(
                lanes=self._lanes,
                num_drafts=size.num_drafts,
                shape=shape,
                buffer=self._next_buffer,
            )
        )
        self._next_buffer = (self._next_buffer + 1) % NUM_BUFFERS

    def _write(self, size: _Size) -> None:
        """Bring drafts and block tables on the device up to date, or all after an eager step."""
        if self._written_drafts != size.num_drafts:
            self._state.write_batch([lane.placement.slot for lane in self._lanes], size.num_drafts)
            self._written_drafts = size.num_drafts
        if not self._is_written:
            self._state.write_requests(
                [
                    SlotRow(
                        slot=lane.placement.slot,
                        length=len(lane.request.ids_target) - 1,
                        newest_id_target=lane.request.ids_target[-1],
                        blocks=lane.placement.table.blocks,
                        sampling=slot_sampling(lane.request.params),
                    )
                    for lane in self._lanes
                ]
            )
            self._is_written = True
        else:
            cells = [
                (lane.placement.slot, index, lane.placement.table.blocks[index])
                for lane in self._lanes
                if lane.num_written_blocks < len(lane.placement.table.blocks)
                for index in range(lane.num_written_blocks, len(lane.placement.table.blocks))
            ]
            if not cells:
                return
            self._state.write_blocks(cells)
        for lane in self._lanes:
            lane.num_written_blocks = len(lane.placement.table.blocks)

    def _join(self) -> bool:
        """Take the running requests as lanes; False when one of them needs the eager path."""
        running = self._scheduler.running
        kind = round_kind([request.params for request in running])
        if kind is None or not all(_may_join(request) for request in running):
            return False
        known = {id(lane.placement): lane for lane in self._lanes} if self._is_written else {}
        if known and any(id(request.placed) not in known for request in running):
            if self._flights:
                return False  # one whose prompt came from elsewhere: all are written anew
            self._is_written, known = False, {}
        lanes = tuple(known.get(id(request.placed)) or self._lane(request) for request in running)
        num_rows = sum(lane.limit + 1 for lane in lanes)
        batch = smallest_fit(self._runner.batches, len(lanes))
        count = smallest_fit(self._runner.draft_counts, max(lane.limit for lane in lanes))
        if batch is None or count is None or num_rows > self._config.max_num_batched_tokens:
            return False
        for lane in lanes:  # rows beyond a lane's own drafts need positions, too
            lane.last_length = min(lane.last_length, self._config.max_model_len - count - 1)
        self._lanes, self._batch, self._written_drafts = lanes, batch, None
        self._kind = kind
        self._seen_version = self._scheduler.version
        return True

    def _lane(self, request: Request) -> Lane:
        limit = self._scheduler.wanted_drafts(request)
        last_length = self._proposer.last_length(limit)
        room = self._config.max_model_len - limit - 1
        return Lane(
            request=request,
            placement=request.placed,
            limit=limit,
            last_length=room if last_length is None else min(last_length, room),
            num_written_blocks=0,
        )


def _may_join(request: Request) -> bool:
    """Whether rounds on the device can go on with a request: they make its drafts themselves."""
    return request.placed.is_decoding and request.placed.received is None
