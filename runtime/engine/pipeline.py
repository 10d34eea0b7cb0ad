"""Rounds that run on the device one ahead of what the host has read.

A round is launched while the one before it is unread, so the host knows only bounds: after p unread
rounds of W rows a request has at most p W tokens more. Launching needs room, blocks and draft
positions for that bound. A request that turns out to have ended loses its later tokens, which no
one read. Whatever does not fit (eager prefills, general options, the end of a context, lack of
blocks) drains the pipeline, and the eager path goes on from the same state with the same bits.

Requests with a grammar are a group apart with split rounds (`runtime.engine.split_rounds`): their
halves are launched between whole rounds of the others and read in the order of the device's queue.
Where one group needs the eager path, neither starts another round.

A captured prefill may be launched behind unread rounds. Of the others one round is launched behind
it, so that the device has work while the host reads what it yields; then its requests join.

Invariants: at most NUM_BUFFERS whole rounds are unread, and one of them behind an unread prefill;
the eager path runs with nothing unread; device state is ahead of the host's by the unread rounds
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.batch import RoundKind
from runtime.config import RuntimeConfig
from runtime.config.round_sizes import smallest_fit
from runtime.engine.block_manager import BlockManager
from runtime.engine.device_rounds import DeviceRounds
from runtime.engine.flights import Flight, Flights
from runtime.engine.known_slots import KnownSlots
from runtime.engine.lanes import Lane, LaneResult, counted_drafts
from runtime.engine.request import Request
from runtime.engine.scheduler import Scheduler
from runtime.engine.slot_params import round_kind
from runtime.engine.split_rounds import SplitRounds
from runtime.graphs.split import split_kind
from runtime.graphs.state import RoundShape


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
class _Group:
    """Requests whose rounds run together.

    Args:
        batch: requests of their rounds, padding included.
        kind: how tokens are chosen.
    """

    lanes: tuple[Lane, ...] = ()
    batch: int = 0
    kind: RoundKind = "greedy"


class Pipeline:
    """Launches rounds ahead and reads them in order.

    Attributes:
        flights: whole rounds that are unread.
        slots: what the device knows of requests.
    """

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
        self.flights = Flights()
        self.slots = KnownSlots(rounds.state)
        self._whole = _Group()  # requests without a grammar
        self._masked = _Group()  # requests with one
        split = rounds.round_.split
        self._split = None if split is None else SplitRounds(rounds.runner, split)
        self._seen_version: int | None = None
        self._is_unread = False  # a round whose requests all left, or a prefill, was not waited for
        self._is_written = False  # lanes go on: no eager step came between

    def settle(self) -> None:
        """Wait for rounds that may still write for requests which left since their launch.

        On the device whoever gets their blocks next comes later; another process does not.
        Sync: waits for the device where there are such rounds.
        """
        is_split = self._split is not None and self._split.is_busy
        if self._is_unread or is_split or any(flight.has_left for flight in self.flights):
            self._runner.settle()
            self._is_unread = False

    @property
    def may_prefill(self) -> bool:
        """Whether a prefill may be launched behind the rounds in flight: requests wait for one."""
        if not self.flights or self._masked.lanes or not self._scheduler.may_admit:
            return False
        is_split = self._split is not None and self._split.is_busy
        return not is_split and all(map(_may_join, self._scheduler.running))

    def end_prefill(self, *, is_read: bool) -> None:
        """Note that the prefill was read, or given up while it may write; its requests may join."""
        self._is_unread |= self.flights.has_prefill and not is_read
        self.flights.end_prefill()
        self._seen_version = None

    def close(self) -> None:
        """End the thread that makes masks."""
        if self._split is not None:
            self._split.close()

    def next_results(self) -> list[LaneResult] | None:
        """Keep rounds in flight and return the oldest one's; None: the eager path's turn.

        Requests that ended or left since the launch have no entry. Sync: waits for that round.
        """
        split = self._split
        while True:
            # Read first what the next split round waits for: its drafts then run a round earlier.
            if split is None or not (split.is_verifying and self._is_split_next()):
                self._fill()
            if split is not None and self._is_split_next():
                self._launch_masked(split, may_wait=True)
                results = split.read() if split.number is not None else []
            elif self.flights:
                results = self._read(self.flights.pop())
            else:
                self._is_written = False
                self._seen_version = None
                return None
            if results:
                return results

    def _is_split_next(self) -> bool:
        """Whether no whole round in flight is older than the split round's half."""
        split = self._split
        if split is None or not split.is_busy:
            return False
        oldest = self.flights.oldest_number
        return oldest is None or (split.number is not None and split.number < oldest)

    def _read(self, flight: Flight) -> list[LaneResult]:
        if not any(lane.is_running for lane in flight.lanes):
            self._is_unread = True
            return []  # not waited for
        rows = self._runner.read(flight.buffer, len(flight.lanes))
        counts = counted_drafts(self._runner, flight.buffer, flight.num_drafts)
        chances = self._runner.confidence(flight.buffer, len(flight.lanes))
        return [
            LaneResult(
                request=lane.request,
                kind=flight.shape.kind,
                num_drafts=num_drafts,
                committed=row[1 : row[0] + 2],
                confidence=tuple(confidence[:num_drafts]),
            )
            for lane, num_drafts, row, confidence in zip(
                flight.lanes, counts, rows, chances, strict=True
            )
            if lane.is_running
        ]

    def _fill(self) -> None:
        """Launch what may be launched without waiting; nothing new when the eager path is due."""
        split = self._split
        if split is not None:
            self._launch_masked(split, may_wait=False)
        if self._scheduler.may_admit and not self.flights.has_prefill:
            return
        if self._seen_version != self._scheduler.version and not self._join():
            return
        if split is not None and self._masked.lanes and not split.is_busy:
            size = self._choose(self._masked)
            if not self._has_room(self._masked, size.count, ahead=0):
                return
            if not self.flights.is_full and self._is_needed and self._prepare() is None:
                return  # the others need the eager path
            self._launch_split(split, size)
        while not self.flights.is_full and self._is_needed:
            prepared = self._prepare()
            if prepared is None:
                return
            self._launch(prepared)

    @property
    def _is_needed(self) -> bool:
        """Whether another whole round may yield a token: every unread one commits one at least."""
        return any(
            lane.request.max_length - len(lane.request.ids_target) > len(self.flights)
            for lane in self._whole.lanes
        )

    def _prepare(self) -> _Size | None:
        """Make room for one more whole round; None when it cannot run here."""
        size = self._choose(self._whole)
        ahead = self.flights.num_tokens_ahead
        return size if self._has_room(self._whole, size.count, ahead=ahead) else None

    def _has_room(self, group: _Group, count: int, *, ahead: int) -> bool:
        """Give requests the blocks of one more round; False where one cannot have it here.

        Args:
            group: whose round.
            count: drafts that the draft makes for each.
            ahead: tokens that unread rounds may have added.
        """
        kv_block_size = self._config.kv_block_size
        for lane in group.lanes:
            length = len(lane.request.ids_target) + ahead
            if length > lane.last_length:
                return False
            table, num_slots = lane.placement.table, length + count
            if len(table.blocks) * kv_block_size < num_slots and not self._blocks.extend(
                table, num_slots=num_slots
            ):
                return False
        return True

    def _choose(self, group: _Group) -> _Size:
        """Choose each lane's drafts from what was read so far, and the size that holds them."""
        choice = self._scheduler.choose_drafts(
            [lane.request for lane in group.lanes], [lane.limit for lane in group.lanes]
        )
        num_drafts = choice.num_drafts
        most, num_rows = max(num_drafts), sum(num_drafts) + len(num_drafts)
        if group is self._masked:
            most = self._runner.draft_counts[-1]
        elif choice.size is not None and self._config.length_mode == "compact":
            most, num_rows = choice.size.num_drafts, choice.size.num_rows
        count = smallest_fit(self._runner.draft_counts, most)
        assert count is not None, "lanes join within the sizes that are captured"
        is_dense = group.kind == "rejection" or group is self._masked
        packed = () if is_dense else self._runner.packed_row_counts(group.batch, count)
        return _Size(
            batch=group.batch,
            count=count,
            num_packed_rows=smallest_fit(packed, num_rows),
            num_drafts=num_drafts,
        )

    def _launch(self, size: _Size) -> None:
        group = self._whole
        ahead = self.flights.num_tokens_ahead
        longest = max(len(lane.request.ids_target) for lane in group.lanes)
        # Rounds that draw are made for the longest context only.
        contexts = self._runner.contexts if group.kind == "greedy" else self._runner.contexts[-1:]
        context = smallest_fit(contexts, longest + ahead + size.count)
        assert context is not None, "`_prepare` keeps rounds within the context"
        shape = RoundShape(
            batch=size.batch,
            num_drafts=size.count,
            context=context,
            num_packed_rows=size.num_packed_rows,
            kind=group.kind,
        )
        self._state.write_batch([lane.placement.slot for lane in group.lanes], size.num_drafts)
        self.slots.write(group.lanes)
        self._runner.launch(shape, self.flights.next_buffer)
        self.flights.add(lanes=group.lanes, num_drafts=size.num_drafts, shape=shape)

    def _launch_split(self, split: SplitRounds, size: _Size) -> None:
        self.slots.write(self._masked.lanes)
        shape = RoundShape(
            batch=size.batch,
            num_drafts=size.count,
            context=self._runner.contexts[-1],
            kind=split_kind(self._masked.kind),
            is_split=True,
        )
        split.start(self._masked.lanes, size.num_drafts, shape, self.flights.num_launches)
        self.flights.count_half()

    def _launch_masked(self, split: SplitRounds, *, may_wait: bool) -> None:
        """Launch the second half of a split round if its masks are made, or once they are."""
        if split.launch_masked(self.flights.num_launches, may_wait=may_wait):
            self.flights.count_half()

    def _join(self) -> bool:
        """Take the running requests as lanes; False when one of them needs the eager path."""
        running = [item for item in self._scheduler.running if not item.placed.is_under_way]
        if not running or not all(_may_join(request) for request in running):
            return False
        old = (*self._whole.lanes, *self._masked.lanes)
        known = {id(lane.placement): lane for lane in old} if self._is_written else {}
        lanes = tuple(known.get(id(request.placed)) or self._lane(request) for request in running)
        if sum(lane.limit + 1 for lane in lanes) > self._config.max_num_batched_tokens:
            return False
        groups = [
            self._group(tuple(lane for lane in lanes if (lane.request.masks is None) is is_whole))
            for is_whole in (True, False)
        ]
        whole, masked = groups
        if whole is None or masked is None or (masked.lanes and self._split is None):
            return False
        self._whole, self._masked = whole, masked
        self._seen_version = self._scheduler.version
        self._is_written = True
        return True

    def _group(self, lanes: tuple[Lane, ...]) -> _Group | None:
        """Return lanes as a group with sizes that are captured; None where there are none."""
        if not lanes:
            return _Group()
        kind = round_kind([lane.request.params for lane in lanes])
        batch = smallest_fit(self._runner.batches, len(lanes))
        most = max(lane.limit for lane in lanes)
        if lanes[0].request.masks is not None:
            most = self._runner.draft_counts[-1]
        count = smallest_fit(self._runner.draft_counts, most)
        if kind is None or batch is None or count is None:
            return None
        for lane in lanes:  # rows beyond a lane's own drafts need positions, too
            lane.last_length = min(lane.last_length, self._config.max_model_len - count - 1)
        return _Group(lanes=lanes, batch=batch, kind=kind)

    def _lane(self, request: Request) -> Lane:
        limit = self._scheduler.wanted_drafts(request)
        last_length = self._proposer.last_length(limit)
        room = self._config.max_model_len - limit - 1
        return Lane(
            request=request,
            placement=request.placed,
            limit=limit,
            last_length=room if last_length is None else min(last_length, room),
            num_written_blocks=self.slots.num_blocks(request),
        )


def _may_join(request: Request) -> bool:
    """Whether rounds on the device can go on with a request: they make its drafts themselves."""
    return request.placed.is_decoding and request.placed.received is None
