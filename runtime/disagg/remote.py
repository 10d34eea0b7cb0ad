"""KV of the stages before the last: what they are told to send, and what they report.

The last stage alone knows requests. It tells the stages before it where a decode server's pools are
and, ahead of the rows of each forward and in the same channel, which blocks that forward makes
final. A stage sends a layer of them as soon as it has launched it, through links of its own, with
the event that marks the end of that layer's kernels; it reports when nothing more is read or
written for a prompt.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
import torch

from runtime.disagg.early import EarlySender
from runtime.disagg.failures import not_written
from runtime.disagg.frames import Prefill
from runtime.disagg.listen import Arrived
from runtime.disagg.outbox import Chunk, Route, Transfer, send_chunks
from runtime.graphs.marks import Ready, mark
from runtime.kv import KVLayer
from specctl.contract.diagnostics import Diagnostic, DiagnosticError

logger = logging.getLogger(__name__)


class OpenWay(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """A decode server offered its pools.

    Args:
        kv_heads: of each target layer, then of each draft layer, over all ranks.
    """

    arrived: Arrived
    kv_heads: tuple[int, ...]


class CloseWay(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """A decode server left, and nothing is on its way there any more."""

    peer: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """A prompt; see `Transfer`."""

    number: int
    peer: str
    first_block: int
    destination_blocks: tuple[int, ...]


class Advance(msgspec.Struct, frozen=True, kw_only=True, tag="advance"):
    """The next forward makes the blocks of a prompt before `end_block` final, layer by layer."""

    number: int
    table: tuple[int, ...]
    end_block: int


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """Nothing more is sent of a prompt: report when that has arrived.

    Args:
        is_whole: every block of it was to be sent.
    """

    number: int
    is_whole: bool
    timeout_s: float


StageOrder: TypeAlias = OpenWay | CloseWay | Begin | Advance | Finish


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a prompt on one stage."""

    num_kv_bytes: int
    problem: Diagnostic | None = None


_ENCODER = msgspec.msgpack.Encoder()
_REPORT_POLL_S = 0.001
_ORDERS = msgspec.msgpack.Decoder(StageOrder)


class Board(Protocol):
    """Where stages put what the last one looks for; `ProcessGroups` has one."""

    def publish(self, key: str, value: str) -> None:
        """Let others read a value."""

    def take(self, key: str) -> str | None:
        """Return a value once; None while it is not there."""


def report_key(rank: int, number: int) -> str:
    """Return where a world rank reports about a prompt."""
    return f"kv/sent/{rank}/{number}"


class StageSender:
    """Sends the layers of a stage as it is told."""

    def __init__(
        self,
        *,
        pool: Sequence[KVLayer],
        layers: range,
        routes: Callable[[OpenWay], Route],
        sender: EarlySender,
        rank: int,
        board: Board,
        device: torch.device,
        mark_end: Callable[[torch.device], Ready] = mark,
    ) -> None:
        """Send nothing yet.

        Args:
            pool: this stage's layers.
            layers: their numbers in the target.
            routes: makes the way to a decode server.
            sender: whose thread writes.
            rank: world rank of this process.
            board: where it reports.
            device: of the pool.
            mark_end: marks the end of what was launched.
        """
        self._pool = tuple(pool)
        self._layers = layers
        self._routes = routes
        self._sender = sender
        self._rank = rank
        self._board = board
        self._device = device
        self._mark_end = mark_end
        self._ways: dict[str, Route | Diagnostic] = {}
        self._transfers: dict[int, Transfer | Diagnostic] = {}
        self._due: list[Chunk] = []
        self._ending: queue.SimpleQueue[tuple[int, Transfer] | None] = queue.SimpleQueue()
        self._reporter = threading.Thread(target=self._report_all, name="kv-reports", daemon=True)
        self._reporter.start()

    def obey(self, payload: bytes) -> None:
        """Carry one order out, in the thread that runs the layers."""
        order = _ORDERS.decode(payload)
        if isinstance(order, OpenWay):
            self._open(order)
        elif isinstance(order, CloseWay):
            way = self._ways.pop(order.peer, None)
            self._sender.leave(order.peer)
            if isinstance(way, Route):
                way.close()
        elif isinstance(order, Begin):
            self._begin(order)
        elif isinstance(order, Advance):
            self._advance(order)
        else:
            self._finish(order)

    def layer_done(self, layer: int) -> None:
        """Send what the forward that runs makes final of a layer; its kernels were launched."""
        send_chunks((layer,), self._due, device=self._device, mark_end=self._mark_end)
        if layer == self._layers[-1]:
            self._due.clear()

    def close(self) -> None:
        """Report what was written, and send nothing more."""
        self._sender.close()
        self._ending.put(None)
        self._reporter.join()

    def _open(self, order: OpenWay) -> None:
        try:
            self._ways[order.arrived.peer] = self._routes(order)
        except DiagnosticError as error:
            self._ways[order.arrived.peer] = error.diagnostics[0]

    def _begin(self, order: Begin) -> None:
        way = self._ways[order.peer]
        if not isinstance(way, Route):
            self._transfers[order.number] = way
            return
        self._transfers[order.number] = Transfer(
            way,
            sender=self._sender.of(order.peer),
            pool=self._pool,
            first_block=order.first_block,
            destination_blocks=order.destination_blocks,
        )

    def _advance(self, order: Advance) -> None:
        transfer = self._transfers[order.number]
        if isinstance(transfer, Transfer):
            self._due.append(Chunk(transfer=transfer, table=order.table, end_block=order.end_block))

    def _finish(self, order: Finish) -> None:
        transfer = self._transfers.pop(order.number)
        if not isinstance(transfer, Transfer):
            self._report(order.number, Report(num_kv_bytes=0, problem=transfer))
            return
        unsent = transfer.unsent if order.is_whole else {}
        assert not unsent, f"layers with blocks left: {unsent}"
        transfer.end(order.timeout_s)
        self._ending.put((order.number, transfer))

    def _report_all(self) -> None:
        try:
            self._report_each()
        except DiagnosticError as error:  # the board went with rank 0, and with it who reads it
            logger.warning("prompts are not reported any more: %s", error)

    def _report_each(self) -> None:
        waiting: dict[int, Transfer] = {}
        while self._take_ending(waiting):
            next(iter(waiting.values())).wait(_REPORT_POLL_S)
            self._report_over(waiting)
        for transfer in waiting.values():  # the sender was closed: it has set every outcome
            transfer.wait(_REPORT_POLL_S)
        self._report_over(waiting)

    def _take_ending(self, waiting: dict[int, Transfer]) -> bool:
        """Add transfers that end, waiting for one where there is none; False: no more will come."""
        while True:
            try:
                item = self._ending.get(block=not waiting)
            except queue.Empty:
                return True
            if item is None:
                return False
            waiting[item[0]] = item[1]

    def _report_over(self, waiting: dict[int, Transfer]) -> None:
        """Report transfers as they are over: one that stands still holds up no other."""
        for number in [number for number, transfer in waiting.items() if transfer.is_over]:
            over = waiting.pop(number)
            self._report(number, Report(num_kv_bytes=over.num_kv_bytes, problem=over.problem))

    def _report(self, number: int, report: Report) -> None:
        text = msgspec.json.encode(report).decode()
        self._board.publish(report_key(self._rank, number), text)


class StageOutlet:
    """The stages before the last one, as its rank in the same column tells them to send."""

    def __init__(
        self,
        *,
        tell: Callable[[bytes], None],
        take: Callable[[str], str | None],
        stage_ranks: Sequence[int],
        kv_block_size: int,
        kv_heads: Sequence[int],
    ) -> None:
        """Tell nothing yet.

        Args:
            tell: hands an order to all of these stages.
            take: returns what was put under a key, once; raises where a stage is lost.
            stage_ranks: world ranks of these stages.
            kv_block_size: tokens of a block.
            kv_heads: as in `OpenWay`.
        """
        self._kv_heads = tuple(kv_heads)
        self._tell = tell
        self._take = take
        self._stage_ranks = tuple(stage_ranks)
        self._kv_block_size = kv_block_size
        self._numbers = itertools.count()

    def open(self, arrived: Arrived) -> None:
        """Have ways to a decode server opened; a stage that cannot says so for each prompt."""
        self._order(OpenWay(arrived=arrived, kv_heads=self._kv_heads))

    def close(self, peer: str) -> None:
        """Have the ways to a decode server closed."""
        self._order(CloseWay(peer=peer))

    def begin(self, peer: str, asked: Prefill) -> StageTransfer:
        """Return the way out of these stages for one prompt."""
        number, first_block = next(self._numbers), asked.first_position // self._kv_block_size
        self._order(
            Begin(
                number=number,
                peer=peer,
                first_block=first_block,
                destination_blocks=asked.blocks,
            )
        )
        return StageTransfer(
            order=self._order,
            take=self._take,
            number=number,
            stage_ranks=self._stage_ranks,
            end_block=first_block + len(asked.blocks),
        )

    def _order(self, order: StageOrder) -> None:
        self._tell(_ENCODER.encode(order))


class StageTransfer:
    """The KV of one prompt on its way out of the stages before the last."""

    def __init__(
        self,
        *,
        order: Callable[[StageOrder], None],
        take: Callable[[str], str | None],
        number: int,
        stage_ranks: Sequence[int],
        end_block: int,
    ) -> None:
        """Have sent nothing; `StageOutlet.begin` makes it."""
        self.end_block = end_block
        self._order = order
        self._take = take
        self._number = number
        self._num_sent = 0
        self._missing = list(stage_ranks)
        self._reports: list[Report] = []
        self._has_ended = False

    @property
    def num_kv_bytes(self) -> int:
        """What was sent, as far as it was reported."""
        return sum(report.num_kv_bytes for report in self._reports)

    @property
    def problem(self) -> Diagnostic | None:
        """Why some of it did not arrive, as far as it was reported."""
        return next((item.problem for item in self._reports if item.problem is not None), None)

    @property
    def is_over(self) -> bool:
        """Whether every stage has reported.

        Raises:
            DiagnosticError: SD853 to SD856, a stage is lost.
        """
        if not self._has_ended:
            return False
        for rank in tuple(self._missing):
            text = self._take(report_key(rank, self._number))
            if text is not None:
                self._missing.remove(rank)
                self._reports.append(msgspec.json.decode(text, type=Report))
        return not self._missing

    def advance(self, table: Sequence[int], end_block: int) -> None:
        """Have the blocks before `end_block` sent as the next forward runs, which ends them."""
        end = min(end_block, self.end_block)
        if end > self._num_sent:
            self._num_sent = end
            self._order(Advance(number=self._number, table=tuple(table[:end]), end_block=end))

    def end(self, timeout_s: float, *, is_whole: bool) -> None:
        """Send nothing more; the reports follow."""
        self._has_ended = True
        self._order(Finish(number=self._number, is_whole=is_whole, timeout_s=timeout_s))

    def wait(self, timeout_s: float) -> bool:
        """Give the stages a little time; whether all have reported."""
        if self.is_over:
            return True
        time.sleep(timeout_s)
        return self.is_over


def no_line() -> Diagnostic:
    """Return SD863 for a rank that a decode server did not greet."""
    return not_written("line to the decode server", "it has not greeted this rank")
