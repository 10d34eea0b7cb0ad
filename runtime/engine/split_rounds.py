"""Rounds of requests with a grammar: drafts on the device, masks on the host, then verification.

One split round is under way at most. Its halves stand in the device's queue between whole rounds of
the other requests, and masks are made by a thread of their own: nobody else waits for either.

Invariants: the host knows all tokens of these requests when their round starts; a request that left
in between is padding in the second half, because its blocks may have another owner by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from runtime.batch import RoundKind
from runtime.engine.lanes import Lane, LaneResult, counted_drafts
from runtime.engine.slot_params import round_kind
from runtime.graphs.round import SPLIT_BUFFER, RoundRunner
from runtime.graphs.split import SplitState
from runtime.graphs.state import RoundShape
from runtime.spec.masks import MaskWish, fill_masks
from runtime.spec.row_faults import first_fault


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A split round under way.

    Args:
        number: of the launch of its newest half, among all launches; None while masks are made.
        masks: of its second half; None before the drafts are read.
    """

    lanes: tuple[Lane, ...]
    num_drafts: tuple[int, ...]
    shape: RoundShape
    number: int | None
    masks: Future[None] | None

    @property
    def is_verifying(self) -> bool:
        """Whether the second half was launched."""
        return self.masks is not None and self.number is not None


class SplitRounds:
    """Runs split rounds over the slots of one engine."""

    def __init__(self, runner: RoundRunner, split: SplitState) -> None:
        """Start with nothing under way.

        Args:
            runner: runs the halves over `split`.
            split: what they read and write.
        """
        self._runner = runner
        self._split = split
        self._turn: _Turn | None = None
        # It has no thread before the first request with a grammar.
        self._maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")

    @property
    def is_busy(self) -> bool:
        """Whether a round is under way."""
        return self._turn is not None

    @property
    def is_verifying(self) -> bool:
        """Whether the second half of a round is in flight."""
        return self._turn is not None and self._turn.is_verifying

    @property
    def number(self) -> int | None:
        """The number of the launch that is unread; None without one."""
        return None if self._turn is None else self._turn.number

    def start(
        self, lanes: tuple[Lane, ...], num_drafts: tuple[int, ...], shape: RoundShape, number: int
    ) -> None:
        """Launch the drafts of a round; without any it starts with masks.

        Args:
            lanes: their numbers and tables on the device are current.
            num_drafts: drafts that count, per lane.
            shape: of the round.
            number: of this launch.
        """
        assert self._turn is None, "one split round is under way at most"
        self._runner.make_ready(shape)
        self._split.write_batch([lane.placement.slot for lane in lanes], num_drafts)
        turn = _Turn(lanes=lanes, num_drafts=num_drafts, shape=shape, number=number, masks=None)
        if shape.num_drafts:
            self._runner.launch_drafts(shape)
            self._turn = turn
        else:
            self._ask(turn, [[]] * len(lanes))

    def launch_masked(self, number: int, *, may_wait: bool) -> bool:
        """Launch the second half if its masks are made; returns whether it was launched.

        Args:
            number: of this launch.
            may_wait: whether to wait for them; there is nothing else to do.
        """
        turn = self._turn
        if turn is None or turn.masks is None or turn.number is not None:
            return False
        if not may_wait and not turn.masks.done():
            return False
        self._turn = None  # a fault of a provider is the caller's, and ends the round
        turn.masks.result()
        alive = [lane.is_running for lane in turn.lanes]
        if not any(alive):
            return False
        if not all(alive):
            padding = (self._split.padding_slot, 0)
            cells = [
                (lane.placement.slot, count) if lane.is_running else padding
                for lane, count in zip(turn.lanes, turn.num_drafts, strict=True)
            ]
            self._split.write_batch(*zip(*cells, strict=True))
        self._split.write_masks(len(turn.lanes))
        self._runner.launch(turn.shape, SPLIT_BUFFER)
        self._turn = replace(turn, number=number)
        return True

    def read(self) -> list[LaneResult]:
        """Read the half in flight: drafts, for which masks are then made, or the outcome.

        Requests that ended or left since the launch have no entry. Sync: waits for that half.
        """
        turn = self._turn
        assert turn is not None, "a split round is under way"
        if not turn.is_verifying:
            self._ask(turn, self._runner.read_drafts(len(turn.lanes)))
            return []
        self._turn = None
        if not any(lane.is_running for lane in turn.lanes):
            return []  # not waited for
        rows = self._runner.read(SPLIT_BUFFER, len(turn.lanes))
        counts = counted_drafts(self._runner, SPLIT_BUFFER, turn.num_drafts)
        chances = self._runner.confidence(SPLIT_BUFFER, len(turn.lanes))
        kind = round_kind([lane.request.params for lane in turn.lanes])
        assert kind is not None, "requests of split rounds have a kind"
        return [
            _result(lane, kind, num_drafts, row, confidence)
            for lane, num_drafts, row, confidence in zip(
                turn.lanes, counts, rows, chances, strict=True
            )
            if lane.is_running
        ]

    def close(self) -> None:
        """End the thread that makes masks, once it is through with those it is at."""
        self._maker.shutdown(wait=False, cancel_futures=True)

    def _ask(self, turn: _Turn, drafts: Sequence[Sequence[int]]) -> None:
        """Have the masks of a round made."""
        wishes: list[MaskWish] = []
        for lane, row, count in zip(turn.lanes, drafts, turn.num_drafts, strict=True):
            wish = lane.request.mask_wish(row[:count])
            assert wish is not None, "requests of split rounds have a grammar"
            wishes.append(wish)
        masks = self._maker.submit(fill_masks, wishes, self._split.host_words_BWX)
        self._turn = replace(turn, number=None, masks=masks)


def _result(
    lane: Lane,
    kind: RoundKind,
    num_drafts: int,
    row: Sequence[int],
    confidence: Sequence[float],
) -> LaneResult:
    """Return what a row of the outcome says: ids, or negated faults of rows."""
    committed = list(row[1 : row[0] + 2])
    faults = [max(0, -token) for token in committed]
    problem = first_fault(lane.request.request_id, len(lane.request.ids_target), faults)
    return LaneResult(
        request=lane.request,
        kind=kind,
        num_drafts=num_drafts,
        committed=[] if problem is not None else committed,
        confidence=tuple(confidence[:num_drafts]),
        problem=problem,
    )
