"""The decode side's connections: dials every prefill peer, again and again, and keeps the rooms.

Threads only put events into one queue; `PrefillPeers` acts on them in the thread that polls, so
`Rooms` needs no lock.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from runtime.disagg.frames import Abort, Frame, Offer, Prefill, unreachable
from runtime.disagg.handshake import Hello
from runtime.disagg.limits import Limits
from runtime.disagg.lines import Line, greet
from runtime.disagg.rooms import RoomCounts, Rooms
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class _Up:
    line: Line


@dataclass(frozen=True, kw_only=True, slots=True)
class _Down:
    peer: str
    problem: Diagnostic
    may_write: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Came:
    peer: str
    frame: Frame


_Event: TypeAlias = _Up | _Down | _Came


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
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._lines: dict[str, Line] = {}
        self._rooms = Rooms(tuple(peers), limits)
        self._news = threading.Event()
        self._dialers = [
            _Dialer(name, hello=hello, offer=offer, limits=limits, on_state=on_state)
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

        def put(event: _Event) -> None:
            self._events.put(event)
            self._news.set()
            on_event()

        for dialer in self._dialers:
            dialer.start(put)

    def close(self) -> None:
        """End every connection and thread."""
        for dialer in self._dialers:
            dialer.close()

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

    def _take(self, event: _Event) -> None:
        now = time.monotonic()
        if isinstance(event, _Up):
            self._lines[event.line.name] = event.line
            self._rooms.up(event.line.name, event.line.send, now)
        elif isinstance(event, _Down):
            self._lines.pop(event.peer, None)
            self._rooms.down(event.peer, event.problem, now, may_write=event.may_write)
        else:
            self._rooms.came(event.peer, event.frame, now)


class _Dialer:
    """Keeps one peer connected."""

    def __init__(
        self,
        peer: str,
        *,
        hello: Hello,
        offer: Offer,
        limits: Limits,
        on_state: Callable[[str, Diagnostic | None], None],
    ) -> None:
        self.peer = peer
        self.state = "connecting"
        self._hello = hello
        self._offer = offer
        self._limits = limits
        self._on_state = on_state
        self._closing = threading.Event()
        self._line: Line | None = None
        self._thread: threading.Thread | None = None

    def start(self, put: Callable[[_Event], None]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(put,), name=f"peer-{self.peer}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        line = self._line
        if line is not None:
            line.close()
        if self._thread is not None:
            self._thread.join(2 * self._limits.connect_s)

    def _run(self, put: Callable[[_Event], None]) -> None:
        last = ""
        while not self._closing.is_set():
            problem, may_write = self._connection(put)
            was_ready, self.state = self.state == "ready", problem.oneline()
            if was_ready or self.state != last:  # each attempt of a long outage is no news
                put(_Down(peer=self.peer, problem=problem, may_write=may_write))
                if not self._closing.is_set():
                    self._on_state(self.peer, problem)
            last = self.state
            self._closing.wait(self._limits.retry_s)

    def _connection(self, put: Callable[[_Event], None]) -> tuple[Diagnostic, bool]:
        """Connect and read until the end; return why it ended; does the peer write on?"""
        host, port = parse_address(self.peer, "--peer")
        try:
            opened = socket.create_connection((host, port), self._limits.connect_s)
            line = greet(opened, self._hello, self._limits, name=self.peer)
        except OSError as error:
            return unreachable(self.peer, error.strerror or str(error)), False
        except DiagnosticError as error:
            return error.diagnostics[0], False
        line.send(self._offer)
        self._line = line
        self.state = "ready"
        self._on_state(self.peer, None)
        put(_Up(line=line))
        problem = line.serve(lambda frame: put(_Came(peer=self.peer, frame=frame)))
        return problem, line.may_write


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 host stands in brackets.

    Raises:
        DiagnosticError: SD865, it is none.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return host, int(port)
    raise DiagnosticError(
        diagnose(
            "SD865",
            where=option,
            message=f"`{text}` is no address of a server",
            expected="HOST:PORT, such as 10.0.0.5:9000",
            found=text,
        )
    )
