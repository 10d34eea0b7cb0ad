"""Whole rounds that were launched and not read, and the prefill that may lie between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.engine.lanes import Lane
from runtime.graphs.round import NUM_BUFFERS
from runtime.graphs.state import RoundShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A whole round that was launched and not read; its number among all launches."""

    number: int
    lanes: tuple[Lane, ...]
    num_drafts: tuple[int, ...]
    shape: RoundShape
    buffer: int

    @property
    def has_left(self) -> bool:
        """Whether one of its requests left since the launch."""
        return any(not lane.is_running for lane in self.lanes)


class Flights:
    """The rounds in flight, oldest first."""

    def __init__(self) -> None:
        """Have nothing in flight."""
        self._flights: deque[Flight] = deque()
        self._next_buffer = 0
        self._prefill_at: int | None = None  # launches before an unread prefill
        self._num_launches = 0

    def __len__(self) -> int:
        """Return how many rounds are in flight."""
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """Iterate over the rounds, oldest first."""
        return iter(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether as many rounds are unread as there may be: one behind an unread prefill."""
        at = self._prefill_at
        has_follower = at is not None and any(flight.number >= at for flight in self._flights)
        return has_follower or len(self._flights) >= NUM_BUFFERS

    @property
    def num_launches(self) -> int:
        """Launches of rounds and of halves of split ones, so far; the number of the next one."""
        return self._num_launches

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens that unread rounds may have added to a request."""
        return sum(flight.shape.width for flight in self._flights)

    @property
    def next_buffer(self) -> int:
        """Where the outcome of the next round goes."""
        return self._next_buffer

    @property
    def oldest_number(self) -> int | None:
        """The number of the round that is read next; None without any."""
        return self._flights[0].number if self._flights else None

    @property
    def has_prefill(self) -> bool:
        """Whether a prefill was launched behind rounds and not read."""
        return self._prefill_at is not None

    @property
    def is_prefill_next(self) -> bool:
        """Whether what was launched before that prefill has been read."""
        at = self._prefill_at
        return at is not None and not any(flight.number < at for flight in self._flights)

    def add(
        self, *, lanes: tuple[Lane, ...], num_drafts: tuple[int, ...], shape: RoundShape
    ) -> None:
        """Note a round that was launched into `next_buffer`."""
        self._flights.append(
            Flight(
                number=self._num_launches,
                lanes=lanes,
                num_drafts=num_drafts,
                shape=shape,
                buffer=self._next_buffer,
            )
        )
        self._num_launches += 1
        self._next_buffer = (self._next_buffer + 1) % NUM_BUFFERS

    def count_half(self) -> None:
        """Note that a half of a split round was launched; who runs those keeps it."""
        self._num_launches += 1

    def pop(self) -> Flight:
        """Return the oldest round, which is read next."""
        return self._flights.popleft()

    def begin_prefill(self) -> None:
        """Note that a prefill was launched behind the rounds in flight."""
        self._prefill_at = self._num_launches

    def end_prefill(self) -> None:
        """Note that the prefill was read or given up; without one nothing changes."""
        self._prefill_at = None
