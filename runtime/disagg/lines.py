"""A control connection that is looked after: greeting, frames both ways, an end that is noticed.

Two threads serve a line. One reads; a line on which nothing comes for `Limits.silence_s` is lost.
One writes what `send` queued, and a `Beat` when there is nothing, so no caller waits for a peer.
A side that ends in order says so (`leave_all`): the other one has not lost it.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from runtime.disagg.frames import Beat, Connection, Frame, Greeting, Leaving, unreachable
from runtime.disagg.handshake import Hello, compare
from runtime.disagg.limits import BEATS_PER_SILENCE, Limits
from specctl.contract.diagnostics import Diagnostic, DiagnosticError


class Line:
    """One connection to one peer that has greeted."""

    def __init__(self, connection: Connection, theirs: Hello, limits: Limits) -> None:
        """Take a connection over.

        Args:
            connection: past the greeting of the peer.
            theirs: what the peer said.
            limits: bounds on silence.
        """
        connection.limit(limits.silence_s)
        self.name = connection.name
        self.theirs = theirs
        self._connection = connection
        self._limits = limits
        self._outgoing: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="peer-writer", daemon=True)
        self._heard_at = time.monotonic()
        self._is_open = True
        self._was_cut = False
        self._has_left = False

    @property
    def is_open(self) -> bool:
        """Whether the peer was heard of within the limit, and nobody closed the line."""
        return self._is_open and time.monotonic() - self._heard_at < self._limits.silence_s

    @property
    def may_write(self) -> bool:
        """Whether the peer may go on after the end: it fell silent, or this side cut the line."""
        return self._was_cut or time.monotonic() - self._heard_at >= self._limits.silence_s

    @property
    def has_left(self) -> bool:
        """Whether the peer said that it ends."""
        return self._has_left

    def send(self, frame: Frame) -> None:
        """Queue a frame; one that is queued on a lost line goes nowhere."""
        self._outgoing.put(frame)

    def serve(self, on_frame: Callable[[Frame], None]) -> Diagnostic:
        """Read until the line is lost, in the caller's thread, and return why (SD861)."""
        self._writer.start()
        try:
            while True:
                frame = self._connection.receive()
                self._heard_at = time.monotonic()
                if isinstance(frame, Leaving):
                    self._has_left = True
                    return unreachable(self.name, "it ended in order")
                if not isinstance(frame, Beat):
                    on_frame(frame)
        except DiagnosticError as error:
            return error.diagnostics[0]
        finally:
            self.close()

    def cut(self) -> None:
        """End the line to a peer that does not do what it should."""
        self._was_cut = True
        self.close()

    def say_leaving(self) -> None:
        """Queue the last frame, behind all others."""
        self._outgoing.put(Leaving())
        self._outgoing.put(None)

    def wait_said(self, timeout_s: float) -> None:
        """Wait until the last frame is on its way; a peer that reads nothing ends no wait."""
        if self._writer.ident is not None:  # it has begun
            self._writer.join(timeout_s)

    def close(self) -> None:
        """End the line; `serve` returns."""
        self._is_open = False
        self._outgoing.put(None)
        self._connection.close()

    def _write(self) -> None:
        interval_s = self._limits.silence_s / BEATS_PER_SILENCE
        while self._is_open:
            try:
                frame = self._outgoing.get(timeout=interval_s)
            except queue.Empty:
                frame = Beat()
            if frame is None:
                return
            try:
                self._connection.send(frame)
            except DiagnosticError:
                self._connection.close()  # the reader says why
                return


def leave_all(lines: Sequence[Line], timeout_s: float) -> None:
    """End lines in order: what is queued goes, and then the word that this side ends.

    Args:
        lines: of one side.
        timeout_s: for all of that; then they end without it.
    """
    end = time.monotonic() + timeout_s
    for line in lines:
        line.say_leaving()
    for line in lines:
        line.wait_said(max(0.0, end - time.monotonic()))
    for line in lines:
        line.close()


def greet(peer: socket.socket, ours: Hello, limits: Limits, *, name: str) -> Line:
    """Greet over a fresh connection and wait for the answer.

    Raises:
        DiagnosticError: SD860, the sides do not fit; SD861, no answer came. The socket is closed.
    """
    with _fresh(peer, limits, name) as connection:
        connection.send(Greeting(hello=ours))
        theirs = _greeting(connection)
        compare(ours, theirs)
    return Line(connection, theirs, limits)


def hear_greeting(peer: socket.socket, ours: Hello, limits: Limits, *, name: str) -> Line:
    """Wait for a greeting over a fresh connection; `Line.serve` answers it.

    The peer goes on when it has the answer, so whoever needs the line is told of it before `serve`.

    Raises:
        DiagnosticError: SD860, the sides do not fit, which the peer gets to know, too; SD861, no
            greeting came. The socket is closed.
    """
    answer = Greeting(hello=ours)
    with _fresh(peer, limits, name) as connection:
        theirs = _greeting(connection)
        try:
            compare(ours, theirs)
        except DiagnosticError:
            connection.send(answer)
            raise
    line = Line(connection, theirs, limits)
    line.send(answer)  # before anybody can queue another frame
    return line


@contextmanager
def _fresh(peer: socket.socket, limits: Limits, name: str) -> Iterator[Connection]:
    """Take a socket over for greetings; it is closed when they fail."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(peer, name=name)
    connection.limit(limits.connect_s)
    try:
        yield connection
    except DiagnosticError:
        connection.close()
        raise


def _greeting(connection: Connection) -> Hello:
    first = connection.receive()
    if not isinstance(first, Greeting):
        raise DiagnosticError(unreachable(connection.name, "a frame before the greeting"))
    return first.hello
