"""The prefill side's connections: a listener, and the lines of every decode server that came.

Threads only put events into one queue, which the engine's thread reads with `poll`.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from runtime.disagg.frames import Failed, Frame, Offer, Prefilled, Released
from runtime.disagg.handshake import Hello
from runtime.disagg.limits import Limits
from runtime.disagg.lines import Line, hear_greeting, leave_all
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag="arrived"):
    """A decode server greeted and offered its pools.

    Args:
        peer: the connection, under the name that all ranks of this server have for it.
        theirs: how it greeted.
        offer: where its pools are.
    """

    peer: str
    theirs: Hello
    offer: Offer


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """A decode server sent a frame."""

    peer: str
    frame: Frame


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """A decode server has ended or is lost: nothing may be written for it any more."""

    peer: str
    problem: Diagnostic


PeerEvent: TypeAlias = Arrived | Said | Left


@dataclass(kw_only=True, slots=True)
class _Lines:
    by_peer: dict[str, Line] = field(default_factory=dict)
    gone: deque[str] = field(default_factory=lambda: deque(maxlen=256))
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass(kw_only=True, slots=True)
class ServedCounts:
    """What was told to decode servers since the start."""

    num_prefilled: int = 0
    num_released: int = 0
    num_kv_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, frame: Prefilled | Failed | Released) -> None:
        """Count one frame."""
        if isinstance(frame, Prefilled):
            self.num_prefilled += 1
            self.num_kv_bytes += frame.num_kv_bytes
        elif isinstance(frame, Failed):
            self.failures[frame.problem.code] += 1
        else:
            self.num_released += 1


class DecodePeers:
    """What a prefill engine sees of all decode servers."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        hello: Hello,
        limits: Limits,
        on_state: Callable[[str, Diagnostic | None], None],
        on_left: Callable[[str], None],
    ) -> None:
        """Take a listening socket over; `start` accepts.

        Args:
            listener: from `listen_at`.
            hello: what this side says first.
            limits: bounds on waiting.
            on_state: called in any thread when a decode server came (None), was refused, or is
                lost and this side had not closed.
            on_left: called in any thread when a decode server ended in order.
        """
        self._listener = listener
        self._hello = hello
        self._limits = limits
        self._on_state = on_state
        self._on_left = on_left
        self._events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._lines = _Lines()
        self.counts = ServedCounts()

    @property
    def address(self) -> str:
        """`host:port` at which decode servers reach this one."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def has_news(self) -> bool:
        """Whether something happened since the last `poll`."""
        return self._news.is_set()

    def start(self, on_event: Callable[[], None]) -> None:
        """Begin to accept.

        Args:
            on_event: called in any thread when `poll` has something new to find.
        """

        def put(event: PeerEvent) -> None:
            self._events.put(event)
            self._news.set()
            on_event()

        threading.Thread(
            target=self._accept, args=(put,), name="peer-listener", daemon=True
        ).start()

    def close(self) -> None:
        """Accept nobody any more and end every line in order."""
        self._end_accepting()
        leave_all(self._open_lines(), self._limits.connect_s)
        self.stop()

    def stop(self) -> None:
        """Accept nobody any more and end every line at once: decode servers have lost this one."""
        self._end_accepting()
        for line in self._open_lines():
            line.close()

    def poll(self) -> tuple[PeerEvent, ...]:
        """Return what happened since the last call, in order for each decode server."""
        self._news.clear()  # before the look, so that nothing is missed
        found: list[PeerEvent] = []
        while True:
            try:
                found.append(self._events.get_nowait())
            except queue.Empty:
                return tuple(found)

    def send(self, peer: str, frame: Prefilled | Failed | Released) -> None:
        """Queue a frame for a decode server; never waits. To one that left it goes nowhere."""
        self.counts.add(frame)
        line = self._line(peer)
        if line is not None:
            line.send(frame)

    def may_write(self, peer: str) -> bool:
        """Return whether KV may still be written to a decode server: it was heard of in time."""
        line = self._line(peer)
        return line is not None and line.is_open

    def wait_for(self, peer: str) -> bool:
        """Wait until a decode server has greeted this rank too; whether it did so in time.

        One whose offer rank 0 has got was known here before: the answer to its greeting came later.
        """
        lines = self._lines
        with lines.changed:
            lines.changed.wait_for(
                lambda: peer in lines.by_peer or peer in lines.gone, self._limits.connect_s
            )
            return peer in lines.by_peer

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; see `has_news`."""
        return self._news.wait(timeout_s)

    def states(self) -> dict[str, str]:
        """Return `ready` for every decode server that is connected; for /health."""
        with self._lines.changed:
            return {line.name: "ready" for line in self._lines.by_peer.values()}

    def _end_accepting(self) -> None:
        self._closing.set()
        with suppress(OSError):  # not on every system; closing alone would not wake `accept`
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _open_lines(self) -> tuple[Line, ...]:
        with self._lines.changed:
            return tuple(self._lines.by_peer.values())

    def _line(self, peer: str) -> Line | None:
        with self._lines.changed:
            return self._lines.by_peer.get(peer)

    def _accept(self, put: Callable[[PeerEvent], None]) -> None:
        while True:
            try:
                peer, address = self._listener.accept()
            except OSError:  # the listener was closed
                return
            name = f"{address[0]}:{address[1]}"
            threading.Thread(
                target=self._serve, args=(peer, name, put), name=f"peer-{name}", daemon=True
            ).start()

    def _serve(self, peer: socket.socket, name: str, put: Callable[[PeerEvent], None]) -> None:
        """Answer a greeting once the line is known, then read until the end; in its own thread."""
        try:
            line = hear_greeting(peer, self._hello, self._limits, name=name)
        except DiagnosticError as error:
            self._on_state(name, error.diagnostics[0])
            return
        key = line.theirs.session or name
        with self._lines.changed:
            self._lines.by_peer[key] = line
            self._lines.changed.notify_all()
        if self._closing.is_set():  # it came before the line was known
            line.close()
        self._on_state(name, None)
        problem = line.serve(lambda frame: put(_event_of(key, line, frame)))
        with self._lines.changed:
            del self._lines.by_peer[key]
            self._lines.gone.append(key)
            self._lines.changed.notify_all()
        put(Left(peer=key, problem=problem))
        if self._closing.is_set():
            return
        if line.has_left:
            self._on_left(name)
        else:
            self._on_state(name, problem)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens for decode servers.

    Raises:
        DiagnosticError: SD835, the address is taken or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise DiagnosticError(
            diagnose(
                "SD835",
                where="--listen",
                message="the server cannot listen at this address",
                expected="a free port of an address of this machine",
                found=f"{host}:{port}: {error.strerror or error}",
                help="Choose another address for `--listen`, or stop the other process",
            )
        ) from error


def _event_of(key: str, line: Line, frame: Frame) -> PeerEvent:
    if isinstance(frame, Offer):
        return Arrived(peer=key, theirs=line.theirs, offer=frame)
    return Said(peer=key, frame=frame)
