"""Keeps one prefill server connected: a line to each of its ranks, all of them or none.

Every rank of a prefill server writes KV, so each is greeted, is heard of and hears of this side by
itself: a rank that is cut off stops writing without being told. Prompts and answers go over the
line of rank 0. When one line is lost the server is: the others are ended, and the peer counts as
one that may write on unless all of them had ended by themselves.
"""

from __future__ import annotations

import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from runtime.disagg.frames import Frame, Offer, unreachable
from runtime.disagg.handshake import Hello, compare_ranks, of_rank
from runtime.disagg.limits import Limits
from runtime.disagg.lines import Line, greet
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class Up:
    """A prefill server is connected."""

    line: Line


@dataclass(frozen=True, kw_only=True, slots=True)
class Down:
    """A prefill server is lost or refused.

    Args:
        may_write: some rank of it may go on writing for a while.
    """

    peer: str
    problem: Diagnostic
    may_write: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Came:
    """A prefill server sent a frame."""

    peer: str
    frame: Frame


DialEvent: TypeAlias = Up | Down | Came


class Dialer:
    """Dials one prefill server, again and again."""

    def __init__(
        self,
        peer: str,
        *,
        hello: Hello,
        offer: Offer,
        limits: Limits,
        on_state: Callable[[str, Diagnostic | None], None],
    ) -> None:
        """Do not dial yet.

        Args:
            peer: `host:port` of rank 0.
            hello: what this side says first.
            offer: where KV may be written.
            limits: bounds on waiting.
            on_state: called with the peer and its problem when either changes.
        """
        self.peer = peer
        self.state = "connecting"
        self._hello = hello
        self._offer = offer
        self._limits = limits
        self._on_state = on_state
        self._closing = threading.Event()
        self._lines: tuple[Line, ...] = ()
        self._thread: threading.Thread | None = None

    def start(self, put: Callable[[DialEvent], None]) -> None:
        """Begin; `put` is called in this dialer's threads."""
        self._thread = threading.Thread(
            target=self._run, args=(put,), name=f"peer-{self.peer}", daemon=True
        )
        self._thread.start()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines to all ranks, as long as the server is connected."""
        return self._lines

    def end_dialing(self) -> None:
        """Dial no more; lines that there are live on."""
        self._closing.set()

    def stop(self) -> None:
        """Dial no more and end the lines; waits for nothing."""
        self.end_dialing()
        for line in self._lines:
            line.close()

    def join(self) -> None:
        """Wait for the thread after `stop`."""
        if self._thread is not None:
            self._thread.join(2 * self._limits.connect_s)

    def _run(self, put: Callable[[DialEvent], None]) -> None:
        last = ""
        while not self._closing.is_set():
            problem, may_write = self._connection(put)
            was_ready, self.state = self.state == "ready", problem.oneline()
            if was_ready or self.state != last:  # each attempt of a long outage is no news
                put(Down(peer=self.peer, problem=problem, may_write=may_write))
                if not self._closing.is_set():
                    self._on_state(self.peer, problem)
            last = self.state
            self._closing.wait(self._limits.retry_s)

    def _connection(self, put: Callable[[DialEvent], None]) -> tuple[Diagnostic, bool]:
        """Connect and read until the end; return why it ended; does the peer write on?"""
        try:
            lines = self._greet_all()
        except DiagnosticError as error:
            return error.diagnostics[0], False
        first = lines[0]
        first.send(self._offer)
        self._lines = lines
        if self._closing.is_set():  # it came before the lines were known
            self.stop()
        self.state = "ready"
        self._on_state(self.peer, None)
        put(Up(line=first))
        return self._serve(lines, lambda frame: put(Came(peer=self.peer, frame=frame)))

    def _greet_all(self) -> tuple[Line, ...]:
        """Return lines to all ranks, that of rank 0 first.

        Raises:
            DiagnosticError: SD860 and SD870 (another process than it should be), SD861.
        """
        hello = msgspec.structs.replace(self._hello, session=uuid.uuid4().hex)
        lines = [self._greet(self.peer, hello)]
        host, _, _ = self.peer.rpartition(":")
        try:
            for rank, address in enumerate(lines[0].theirs.ranks, start=1):
                place = f"{host}{address}" if address.startswith(":") else address
                lines.append(self._greet(place, of_rank(hello, rank)))
                compare_ranks(lines[0].theirs, lines[-1].theirs, rank)
        except DiagnosticError:
            for line in lines:
                line.close()
            raise
        return tuple(lines)

    def _greet(self, peer: str, hello: Hello) -> Line:
        host, port = parse_address(peer, "--peer")
        try:
            opened = socket.create_connection((host, port), self._limits.connect_s)
        except OSError as error:
            raise DiagnosticError(unreachable(peer, error.strerror or str(error))) from error
        return greet(opened, hello, self._limits, name=peer)

    def _serve(
        self, lines: Sequence[Line], on_frame: Callable[[Frame], None]
    ) -> tuple[Diagnostic, bool]:
        """Read all lines until one is lost, then end the others."""
        problems: list[Diagnostic] = []
        is_lost = threading.Event()

        def follow(line: Line, on_frame: Callable[[Frame], None]) -> None:
            problems.append(line.serve(on_frame))
            if len(lines) > 1 and not is_lost.is_set():
                is_lost.set()
                if self._closing.wait(self._limits.fence_s):  # ranks of a server end together
                    return  # this side ends, and with it every line
                for other in lines:
                    (other.cut if other.is_open else other.close)()

        others = [
            threading.Thread(
                target=follow, args=(line, lambda _: None), name=f"peer-{line.name}", daemon=True
            )
            for line in lines[1:]
        ]
        for thread in others:
            thread.start()
        follow(lines[0], on_frame)
        for thread in others:
            thread.join()
        return problems[0], any(line.may_write for line in lines)


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
