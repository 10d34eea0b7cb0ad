"""Signs of life of processes whose exchanges wait on a device, where no time limit ends a wait.

Each says a new number in the common store, from a thread of its own; rank 0 looks at them. A rank
may live and stand still all the same: then rank 0's own step does not go on, which it looks at too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

from specctl.contract.diagnostics import Diagnostic, DiagnosticError

_LAST_WORD_S = 5.0
"""For a sign that is on its way to the store; one that hangs is not waited for."""


class Board(Protocol):
    """Where signs are left; `ProcessGroups` has one."""

    def publish(self, key: str, value: str) -> None:
        """Let others read a value.

        Raises:
            DiagnosticError: SD855, the store is gone.
        """

    def peek(self, key: str) -> str | None:
        """Return a value; None while it is not there.

        Raises:
            DiagnosticError: SD855, the store is gone.
        """


def pulse_key(rank: int) -> str:
    """Return the key under which a rank shows that it lives."""
    return f"alive/{rank}"


class Pulse:
    """Shows that this process lives, while it is open."""

    def __init__(
        self, board: Board, rank: int, *, every_s: float, on_lost: Callable[[Diagnostic], None]
    ) -> None:
        """Start.

        Args:
            board: where signs are left.
            rank: of this process.
            every_s: between two signs.
            on_lost: told in the thread of the signs that rank 0 and its store are gone.
        """
        self._on_lost = on_lost
        self._board = board
        self._rank = rank
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def __enter__(self) -> Pulse:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Say nothing more."""
        self._is_over.set()
        self._thread.join(_LAST_WORD_S)

    def _beat(self) -> None:
        number = 0
        while True:
            try:
                self._board.publish(pulse_key(self._rank), str(number))
            except DiagnosticError as error:
                if not self._is_over.is_set():
                    self._on_lost(error.diagnostics[0])
                return
            number += 1
            if self._is_over.wait(self._every_s):
                return


class PulseWatch:
    """The signs of other ranks, as rank 0 reads them."""

    def __init__(
        self,
        board: Board,
        ranks: Sequence[int],
        *,
        limit_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count silence from now on.

        Args:
            board: where they leave them.
            ranks: that are asked.
            limit_s: that a rank may be silent.
            now: seconds.
        """
        self._board = board
        self._limit_s = limit_s
        self._now = now
        self._last: dict[int, tuple[str | None, float]] = {rank: (None, now()) for rank in ranks}

    def silent_rank(self) -> int | None:
        """Return a rank that has shown nothing new for longer than the limit.

        Raises:
            DiagnosticError: SD855, the store is gone.
        """
        for rank, (shown, since_s) in self._last.items():
            found = self._board.peek(pulse_key(rank))
            if found != shown:
                self._last[rank] = (found, self._now())
            elif self._now() - since_s > self._limit_s:
                return rank
        return None


Progress: TypeAlias = tuple[int, ...]
"""Numbers that change as long as a step goes on."""


class StepWatch:
    """A step of this process, as another thread of it sees it."""

    def __init__(
        self,
        progress: Callable[[], Progress | None],
        *,
        limit_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know no step.

        Args:
            progress: of the step under way; None between steps, which may last for any time.
            limit_s: that a step may show nothing new.
            now: seconds.
        """
        self._progress = progress
        self._limit_s = limit_s
        self._now = now
        self._last: tuple[Progress | None, float] = (None, now())

    def is_standing(self) -> bool:
        """Return whether a step has shown nothing new for longer than the limit."""
        shown, since_s = self._last
        found = self._progress()
        if found is None or found != shown:
            self._last = (found, self._now())
            return False
        return self._now() - since_s > self._limit_s
