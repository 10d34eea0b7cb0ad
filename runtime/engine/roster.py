"""The requests of an engine, from the moment it takes them to their last delta.

What rounds yield is taken in here: tokens change in the commit only, and nothing after a stop
reaches ids, text, usage, KV or prefix cache.

A draft that fails to observe a round takes none of its tokens back: they are delivered, and the
fault is raised by the next step. The requests of that round start over behind their tokens, so that
the draft is told of every position again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.engine.block_manager import BlockManager
from runtime.engine.commit import Kept, keep_tokens, take_text
from runtime.engine.counting import RoundCounter
from runtime.engine.handover import Arrival, Handover
from runtime.engine.lanes import LaneResult
from runtime.engine.request import FinishReason, Request, RequestDelta
from runtime.engine.round import Round, StartedRound, tell_proposer
from runtime.engine.scheduler import Scheduler
from runtime.engine.under_way import Blamed
from runtime.spec.types import Proposer, RoundResult, TokenLogprobs
from specctl.contract.diagnostics import Diagnostic


class Roster:
    """Requests in flight: what rounds add to them, and how they end."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        blocks: BlockManager,
        proposer: Proposer,
        handover: Handover,
        counter: RoundCounter,
    ) -> None:
        """Have no requests; the parts are the engine's own."""
        self._scheduler = scheduler
        self._blocks = blocks
        self._proposer = proposer
        self._handover = handover
        self._counter = counter
        self._requests: dict[str, Request] = {}
        self._leaving: set[str] = set()  # aborted while their rows are under way
        self._fault: Exception | None = None  # behind the deltas of the last round

    def __len__(self) -> int:
        """Return how many requests are in flight."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, oldest first."""
        return iter(self._requests.values())

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this name is in flight."""
        return request_id in self._requests

    def __getitem__(self, request_id: str) -> Request:
        """Return a request that is in flight."""
        return self._requests[request_id]

    def find(self, request_id: str) -> Request | None:
        """Return a request if it is in flight."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Take an admitted request."""
        self._requests[request.request_id] = request

    @property
    def has_fault(self) -> bool:
        """Whether `raise_fault` raises."""
        return self._fault is not None

    def raise_fault(self) -> None:
        """Raise, once, why the draft did not observe the last round."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def retire(self, request_id: str) -> None:
        """Let go of a parked request; it was counted when it ended."""
        self._scheduler.remove(self._requests.pop(request_id))

    def abort(self, request_id: str) -> bool:
        """Drop a request; see `Engine.abort`."""
        request = self._requests.get(request_id)
        if request is None or request_id in self._leaving:
            return False
        if request.placement is not None and request.placement.is_under_way:
            self._leaving.add(request_id)
        else:
            self._drop(request, "abort")
        return True

    def abandon(self) -> None:
        """Drop what was aborted while under way: nothing is any more."""
        for request_id in self._leaving:
            self._drop(self._requests[request_id], "abort")
        self._leaving.clear()

    def commit(self, done: Round, started: StartedRound) -> list[RequestDelta]:
        """Take a round's tokens in, tell the proposer, name full blocks, end what is done.

        Where the proposer fails and somebody got tokens, `raise_fault` has the fault.
        """
        rows = done.rows
        self._counter.count(done, started.plan)
        kept = [
            keep_tokens(request, committed)
            for request, committed in zip(rows.yielding, done.result.committed, strict=True)
        ]
        try:
            tell_proposer(self._proposer, done)
        except Exception as error:  # whatever it is, it is raised: here, or behind the tokens
            if any(request.is_parked_at_end for request in started.plan.requests):
                raise  # they are handed over with what the draft keeps, or not at all
            deltas = self._end_round(done, started, kept)
            self._start_over(started.plan.requests)
            if not deltas:
                raise
            self._fault = error
            return deltas
        for span in rows.spans:
            span.request.placed.num_final_rows = span.num_final_rows
            span.request.placed.received = None
            self._settle_blocks(span.request, span.start + span.num_final_rows)
        return self._end_round(done, started, kept)

    def _end_round(
        self, done: Round, started: StartedRound, kept: Sequence[Kept]
    ) -> list[RequestDelta]:
        """Deliver what a round's requests keep; none of them is under way any more."""
        deltas = self._deliver(done.rows.yielding, kept, done.result.logprobs)
        return self._without_leaving(started.plan.requests, deltas) if self._leaving else deltas

    def _start_over(self, requests: Sequence[Request]) -> None:
        """Queue the requests that did not end, oldest first: all their positions run again."""
        for request in reversed(requests):
            if request.request_id in self._requests:
                self._scheduler.preempt(request)

    def commit_results(self, found: Sequence[LaneResult]) -> list[RequestDelta]:
        """Take in what a round on the device yielded; the draft has observed it already."""
        failed = [
            self.fail(lane.request, lane.problem) for lane in found if lane.problem is not None
        ]
        results = [lane for lane in found if lane.problem is None]
        if not results:
            return failed
        requests = [result.request for result in results]
        result = RoundResult(
            committed=tuple(tuple(lane.committed) for lane in results),
            num_drafts=tuple(lane.num_drafts for lane in results),
            num_accepted_drafts=tuple(len(lane.committed) - 1 for lane in results),
        )
        self._counter.count_device_round(results, result)
        kept = [
            keep_tokens(request, committed)
            for request, committed in zip(requests, result.committed, strict=True)
        ]
        for request in requests:
            self._settle_blocks(request, len(request.ids_target) - 1)
        return [*failed, *self._deliver(requests, kept)]

    def commit_arrival(self, request_id: str, arrival: Arrival) -> list[RequestDelta]:
        """Go on with a reserved request whose KV is in its blocks."""
        request = self._requests[request_id]
        self._counter.tally.num_prompt_tokens += request.num_prompt_tokens
        kept = keep_tokens(request, arrival.committed)
        self._handover.take(request, arrival)
        self._counter.tally.num_cached_tokens += request.num_cached_tokens or 0
        self._settle_blocks(request, request.num_prompt_tokens)
        return self._deliver([request], [kept], [arrival.logprobs])

    def fail_all(self, blamed: Sequence[Blamed]) -> list[RequestDelta]:
        """End the requests that a fault names."""
        return [self.fail(item.request, item.problem) for item in blamed]

    def fail(self, request: Request, problem: Diagnostic) -> RequestDelta:
        """End a request that has no rows under way with an error."""
        self._leaving.discard(request.request_id)
        self._drop(request, "error")
        return RequestDelta(
            request_id=request.request_id,
            ids_target=(),
            text=take_text(request, is_finished=True),
            finish_reason="error",
            usage=request.usage(),
            error=problem,
        )

    def _without_leaving(
        self, requests: Sequence[Request], deltas: Sequence[RequestDelta]
    ) -> list[RequestDelta]:
        """Drop the requests that were aborted while under way, and what their rounds yielded."""
        gone = self._leaving & {request.request_id for request in requests}
        self._leaving -= gone
        for request in requests:
            if request.request_id in gone and request.request_id in self._requests:
                self._drop(request, "abort")
        return [delta for delta in deltas if delta.request_id not in gone]

    def _deliver(
        self,
        requests: Sequence[Request],
        kept: Sequence[Kept],
        logprobs: Sequence[tuple[TokenLogprobs, ...]] = (),
    ) -> list[RequestDelta]:
        """Return what was kept, ending the requests that are done.

        Args:
            requests: that got tokens.
            kept: what they keep of them.
            logprobs: of all committed tokens; empty where no request wants them.
        """
        deltas = []
        entries = logprobs or ((),) * len(requests)
        for request, tokens, row in zip(requests, kept, entries, strict=True):
            self._counter.tally.num_output_tokens += len(tokens.ids_target)
            is_finished = tokens.finish_reason is not None
            deltas.append(
                RequestDelta(
                    request_id=request.request_id,
                    ids_target=tokens.ids_target,
                    text=take_text(request, is_finished=is_finished),
                    finish_reason=tokens.finish_reason,
                    usage=request.usage(),
                    logprobs=row[: len(tokens.ids_target)],
                )
            )
            if tokens.finish_reason is not None and request.is_parked_at_end:
                self._scheduler.park(request)
                self._counter.tally.finished[tokens.finish_reason] += 1
            elif tokens.finish_reason is not None:
                self._drop(request, tokens.finish_reason)
        return deltas

    def _settle_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Advance a request over its final rows and make its full blocks findable."""
        placed = request.placed
        placed.num_computed_tokens = num_computed_tokens
        self._blocks.commit(
            placed.table, request.ids_target, num_computed_tokens=num_computed_tokens
        )

    def _drop(self, request: Request, reason: FinishReason) -> None:
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        self._counter.tally.finished[reason] += 1
