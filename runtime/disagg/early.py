"""KV leaves layer by layer while the prefill still runs.

A layer's blocks may be read once its kernels have run, and the host only knows when they were
launched: each part to send comes with the event that marks the end of its kernels, and one thread
waits for that event before it hands the part to the carrier. Parts leave in the order in which they
were queued, so the end of a transfer covers all of them.

Over an ordered link (see `Link`) no thread waits: a copy is launched at once on the caller's
stream, behind the event and before all that either side launches after the end of a transfer.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import torch

from runtime.disagg.failures import not_written
from runtime.disagg.transport import BlockMove, Link
from runtime.graphs.marks import Ready
from specctl.contract.diagnostics import Diagnostic, DiagnosticError


class Outcome:
    """Whether the parts of one transfer were written; set once, by the sender's thread."""

    def __init__(self) -> None:
        """Be open."""
        self._done = threading.Event()
        self.problem: Diagnostic | None = None

    @property
    def is_done(self) -> bool:
        """Whether all parts were written, or one failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it was done in time."""
        return self._done.wait(timeout_s)

    def close(self, problem: Diagnostic | None) -> None:
        """Set the outcome."""
        self.problem = problem
        self._done.set()


def closed(problem: Diagnostic | None) -> Outcome:
    """Return an outcome that is set."""
    outcome = Outcome()
    outcome.close(problem)
    return outcome


_ARRIVED = closed(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    ready: Ready
    link: Link
    moves: tuple[BlockMove, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    link: Link
    outcome: Outcome
    timeout_s: float


class EarlySender:
    """Writes parts in order, each after its event: one thread's, or the caller's where it may.

    A carrier that fails ends the transfers over that link only: later parts of it are dropped and
    its outcome says why.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Start the thread.

        Args:
            device: of the pool that is read. On CUDA, copies that the thread launches run in a
                stream of their own, not behind the layers that come after.
        """
        self._device = device
        self._items: queue.SimpleQueue[_Part | _End | None] = queue.SimpleQueue()
        self._failed: dict[int, Diagnostic] = {}
        self._of_peers: dict[str, EarlySender] = {}
        self._thread = threading.Thread(target=self._serve, name="kv-sender", daemon=True)
        self._thread.start()

    def of(self, peer: str) -> EarlySender:
        """Return the sender for one peer, with a thread of its own.

        A carrier may stand still for as long as its network does: that holds up no other peer.
        """
        if peer not in self._of_peers:
            self._of_peers[peer] = EarlySender(self._device)
        return self._of_peers[peer]

    def leave(self, peer: str) -> None:
        """End the thread of a peer whose transfers are over."""
        sender = self._of_peers.pop(peer, None)
        if sender is not None:
            sender.close()

    def send(self, link: Link, moves: tuple[BlockMove, ...], *, ready: Ready) -> None:
        """Queue a part; over an ordered link, launch it.

        Args:
            link: where to.
            moves: what; the blocks stay as they are until the transfer's outcome is known.
            ready: after this the blocks may be read.
        """
        if not moves:
            return
        part = _Part(ready=ready, link=link, moves=moves)
        if not link.is_ordered:
            self._items.put(part)
            return
        self._write(part)

    def end(self, link: Link, *, timeout_s: float) -> Outcome:
        """Queue the end of a transfer; its outcome is set when every part of the link was written.

        Over an ordered link it is set at once.

        Args:
            link: of the transfer; not used for another one before the outcome is known.
            timeout_s: limit of the carrier's last wait.
        """
        if link.is_ordered:
            problem = self._finish(link, timeout_s)
            return _ARRIVED if problem is None else closed(problem)
        outcome = Outcome()
        self._items.put(_End(link=link, outcome=outcome, timeout_s=timeout_s))
        return outcome

    def close(self) -> None:
        """Write what was queued and end every thread."""
        for peer in tuple(self._of_peers):
            self.leave(peer)
        self._items.put(None)
        self._thread.join()

    @torch.inference_mode()  # pools may have been mapped within it, and mode is of a thread
    def _serve(self) -> None:
        if self._device is None or self._device.type != "cuda":
            self._work()
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._work()

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, _Part):
                self._write(item)
            else:
                item.outcome.close(self._finish(item.link, item.timeout_s))

    def _write(self, part: _Part) -> None:
        if id(part.link) in self._failed:
            return
        try:
            if part.link.is_ordered:
                part.ready.wait()
            else:
                part.ready.synchronize()
            for move in part.moves:
                part.link.write(move)
        except (DiagnosticError, RuntimeError) as error:
            self._failed[id(part.link)] = _problem(error)

    def _finish(self, link: Link, timeout_s: float) -> Diagnostic | None:
        problem = self._failed.pop(id(link), None)
        if problem is not None:
            return problem
        try:
            link.finish(timeout_s)
        except (DiagnosticError, RuntimeError) as error:
            return _problem(error)
        return None


def _problem(error: Exception) -> Diagnostic:
    """Return the carrier's own finding, or SD863 for what the device raised."""
    if isinstance(error, DiagnosticError):
        return error.diagnostics[0]
    return not_written("device of the pool", str(error).partition("\n")[0] or type(error).__name__)
