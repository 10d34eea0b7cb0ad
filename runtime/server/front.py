"""Admission and subscriptions: the asyncio side of the engine's thread.

Invariants: everything here runs on the event loop but `Subscription.deliver`; what has not finished
when a subscription closes is aborted; `num_open` counts what neither finished nor was closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

from runtime.engine.request import RequestDelta, RequestInput
from runtime.server.loop import EngineLoop
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

RETRY_AFTER_S = 1
"""What `Retry-After` says: a round is far shorter, a client that waits less only knocks."""

Outcome: TypeAlias = Literal["stop", "length", "error", "disconnected", "rejected"]


class Front:
    """Takes requests while there is room and tells when to stop."""

    def __init__(self, loop: EngineLoop, *, max_num_requests: int, max_queue: int) -> None:
        """Let `max_queue` requests wait beyond the `max_num_requests` that run."""
        self._loop = loop
        self._max_num_requests = max_num_requests
        self._max_queue = max_queue
        self._open: set[Subscription] = set()
        self._stopping: Diagnostic | None = None
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def engine(self) -> EngineLoop:
        """The engine's thread."""
        return self._loop

    @property
    def num_open(self) -> int:
        """Requests in flight, choices counted one by one."""
        return sum(subscription.num_open for subscription in self._open)

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused."""
        return self._stopping is not None

    def submit(self, inputs: Sequence[RequestInput]) -> Subscription:
        """Admit the requests of one body, all or none.

        Raises:
            DiagnosticError: SD904 there will never be room for so many, SD914 the queue is full,
                SD915 the server is stopping, SD916 the engine's thread has ended, SD855 or SD856
                a pipeline stage has.
        """
        problem = self._stopping or self._loop.problem or self._room_problem(len(inputs))
        if problem is not None:
            self.outcomes["rejected"] += len(inputs)
            raise DiagnosticError(problem)
        subscription = Subscription(self, [item.request_id for item in inputs])
        self._open.add(subscription)
        self._loop.submit(inputs, subscription.deliver)
        return subscription

    def close_admission(self) -> None:
        """Refuse new requests from now on."""
        self._stopping = diagnose("SD915", where="server", message="the server is shutting down")

    def end_all(self, limit: str) -> None:
        """End what is still in flight; also in a signal handler.

        Args:
            limit: what it should have ended within, such as the grace time.
        """
        error = diagnose(
            "SD915",
            where="server",
            message="the server stopped before the answer was complete",
            expected=f"an end {limit}",
            found="still running",
        )
        self._loop.fail_all(error)

    def release(self, subscription: Subscription) -> None:
        """Forget a subscription and abort what it has not finished (called by `close`)."""
        self._open.discard(subscription)
        unfinished = subscription.unfinished_ids
        if unfinished:
            self.outcomes["disconnected"] += len(unfinished)
            self._loop.abort(unfinished)

    def _room_problem(self, num_new: int) -> Diagnostic | None:
        places = self._max_num_requests + self._max_queue
        if self.num_open + num_new <= places:
            return None
        if num_new > places:
            return diagnose(
                "SD904",
                where="body#/n",
                message=f"{num_new} choices (prompts times `n`) are more than the server holds",
                expected=f"at most {places}",
                found=num_new,
            )
        return diagnose(
            "SD914",
            where="server",
            message="the queue is full",
            expected=f"at most {self._max_queue} waiting requests",
            found=max(self.num_open + num_new - self._max_num_requests, 0),
        )


class Subscription:
    """Deltas of the requests of one body, in the order in which rounds made them."""

    def __init__(self, front: Front, request_ids: Sequence[str]) -> None:
        """Wait for these requests; use `Front.submit`."""
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[RequestDelta] = asyncio.Queue()
        self._index_of = {request_id: index for index, request_id in enumerate(request_ids)}
        self._unfinished = dict.fromkeys(request_ids)

    @property
    def num_open(self) -> int:
        """Requests that have not finished."""
        return len(self._unfinished)

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Ids of the requests that have not finished."""
        return tuple(self._unfinished)

    def index_of(self, request_id: str) -> int:
        """Return the choice index of a request."""
        return self._index_of[request_id]

    def deliver(self, delta: RequestDelta) -> None:
        """Take a delta in the engine's thread; after a forced end nobody reads it any more."""
        try:
            self._loop.call_soon_threadsafe(self._put, delta)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def next(self) -> RequestDelta:
        """Wait for the next delta; there is none after the last request has finished."""
        return await self._deltas.get()

    def close(self) -> None:
        """End the subscription; may be called twice."""
        self._front.release(self)
        self._unfinished.clear()

    def _put(self, delta: RequestDelta) -> None:
        if delta.finish_reason is not None and delta.request_id in self._unfinished:
            del self._unfinished[delta.request_id]
            reason = delta.finish_reason
            self._front.outcomes["disconnected" if reason == "abort" else reason] += 1
        self._deltas.put_nowait(delta)
