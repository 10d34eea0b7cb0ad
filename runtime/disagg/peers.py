"""The decode side's connections: dials every prefill peer, again and again, and keeps the rooms.

Threads only put events into one queue; `PrefillPeers` acts on them in the thread that polls, so
`Rooms` needs no lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from runtime.disagg.dialer import Dialer, DialEvent, Down, Up
from runtime.disagg.frames import Abort, Frame, Offer, Prefill
from runtime.disagg.handshake import Hello
from runtime.disagg.limits import Limits
from runtime.disagg.lines import Line, leave_all
from runtime.disagg.rooms import RoomCounts, Rooms
from specctl.contract.diagnostics import Diagnostic


class PrefillPeers:
    """What a decode engine sees of all prefill servers: frames out, frames in."""

    def __init__(
        self,
        peers: Sequence[str],
        *,
        hello: Hello,
        offer: Offer,
        limits: Limits,
        on_state: Callable[[str, Diagnostic | None], None],
    ) -> None:
        """Know the peers; `start` dials them.

        Args:
            peers: `host:port` of each.
            hello: what this side says first.
            offer: where KV may be written.
            limits: bounds on waiting.
            on_state: called in any thread with a peer and its problem when either changes; None:
                it is connected.
        """
        self._events: queue.SimpleQueue[DialEvent] = queue.SimpleQueue()
        self._lines: dict[str, Line] = {}
        self._limits = limits
        self._rooms = Rooms(tuple(peers), limits)
        self._news = threading.Event()
        self._dialers = [
            Dialer(name, hello=hello, offer=offer, limits=limits, on_state=on_state)
            for name in peers
        ]

    @property
    def counts(self) -> RoomCounts:
        """What happened since the start."""
        return self._rooms.counts

    @property
    def num_rooms(self) -> int:
        """Requests that wait for a prefill, or for the end of one."""
        return len(self._rooms)

    @property
    def num_fenced(self) -> int:
        """Requests whose blocks wait until a peer has stopped writing."""
        return self._rooms.num_fenced

    @property
    def has_news(self) -> bool:
        """Whether a connection said something since the last `poll`."""
        return self._news.is_set()

    def start(self, on_event: Callable[[], None]) -> None:
        """Begin to dial.

        Args:
            on_event: called in any thread when `poll` has something new to find.
        """

        def put(event: DialEvent) -> None:
            self._events.put(event)
            self._news.set()
            on_event()

        for dialer in self._dialers:
            dialer.start(put)

    def close(self) -> None:
        """End every connection in order, and every thread."""
        for dialer in self._dialers:
            dialer.end_dialing()
        lines = [line for dialer in self._dialers for line in dialer.lines]
        leave_all(lines, self._limits.connect_s)
        self.stop()
        for dialer in self._dialers:
            dialer.join()

    def stop(self) -> None:
        """End every connection at once: prefill servers have lost this one."""
        for dialer in self._dialers:
            dialer.stop()

    def send(self, frame: Frame) -> None:
        """Take a `Prefill` or an `Abort` from the engine; never waits for a peer."""
        now = time.monotonic()
        if isinstance(frame, Prefill):
            self._rooms.ask(frame, now)
        else:
            assert isinstance(frame, Abort), f"a decode engine sends no {type(frame).__name__}"
            self._rooms.abort(frame.request_id, now)

    def poll(self) -> tuple[Frame, ...]:
        """Return what came for the engine: `Prefilled`, `Failed` and `Released`."""
        self._news.clear()  # before the look, so that nothing is missed
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            self._take(event)
        self._rooms.tick(time.monotonic())
        for peer in self._rooms.take_unreleased():
            if peer in self._lines:
                self._lines[peer].cut()
        return self._rooms.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; see `has_news`."""
        return self._news.wait(timeout_s)

    def states(self) -> dict[str, str]:
        """Return `ready`, `connecting` or the last problem of each peer; for /health."""
        return {dialer.peer: dialer.state for dialer in self._dialers}

    def _take(self, event: DialEvent) -> None:
        now = time.monotonic()
        if isinstance(event, Up):
            self._lines[event.line.name] = event.line
            self._rooms.up(event.line.name, event.line.send, now)
        elif isinstance(event, Down):
            self._lines.pop(event.peer, None)
            self._rooms.down(event.peer, event.problem, now, may_write=event.may_write)
        else:
            self._rooms.came(event.peer, event.frame, now)
