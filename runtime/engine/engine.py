"""The engine: requests in, deltas out, one round a step.

`step` is schedule -> run a round -> commit. Tokens change in the commit only, so a round that fails
leaves every request as it was: a `DiagnosticError` whose place is `request=<id>` ends that request,
and the round is run again without it; any other fault is the caller's.
Invariants: one thread at a time; nothing after a stop reaches ids, text, usage, KV or prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from runtime.config import RuntimeConfig
from runtime.engine.admission import admit, refuse_full, refuse_known
from runtime.engine.block_manager import BlockManager
from runtime.engine.commit import Kept, keep_tokens, take_text
from runtime.engine.counting import RoundCounter
from runtime.engine.device_rounds import DeviceRounds
from runtime.engine.forwards import Forwards, LocalForwards, RowsListener
from runtime.engine.handover import Arrival, Handover
from runtime.engine.lanes import LaneResult
from runtime.engine.pipeline import Pipeline
from runtime.engine.prefill_costs import PrefillCosts
from runtime.engine.prefills import make_prefills
from runtime.engine.request import Admission, FinishReason, Request, RequestDelta, RequestInput
from runtime.engine.round import Round, StartedRound, tell_proposer
from runtime.engine.scheduler import Scheduler
from runtime.engine.stats import EngineStats
from runtime.engine.under_way import Blamed, RoundsUnderWay
from runtime.graphs.capture import GraphReport
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.adaptive import DraftLengths, StaticLengths
from runtime.spec.forced import ForcedLengths
from runtime.spec.types import Proposer, RoundResult, SlotTensor, TokenLogprobs
from specctl.contract.diagnostics import Diagnostic


class Engine:
    """Runs requests of one target with one proposer."""

    def __init__(
        self,
        *,
        target: TargetModel,
        target_kv: Sequence[KVLayer],
        proposer: Proposer,
        config: RuntimeConfig,
        tokenizer: Tokenizer | None = None,
        rounds: DeviceRounds | None = None,
        lengths: DraftLengths | None = None,
        forced: ForcedLengths | None = None,
        forwards: Forwards | None = None,
        prefill_costs: PrefillCosts | None = None,
    ) -> None:
        """Start without requests.

        Args:
            target: the model whose tokens are served.
            target_kv: its layers of the KV pool, `config.num_kv_blocks` blocks each.
            proposer: who drafts; it holds its own layers of the pool.
            config: settings.
            tokenizer: for texts and stop strings; None serves ids only.
            rounds: runs plain greedy rounds without host reads; None runs every round eagerly.
            lengths: chooses draft counts; None gives every request what it wants.
            forced: decides what rounds accept, here and in `rounds`; None: the target does.
            forwards: runs the target's forwards when it is spread over stages, `target` being the
                last one; None runs them here.
            prefill_costs: decide whether prompts run by graphs; None: the number of graphs does.
        """
        lengths = lengths or StaticLengths()
        self.config = config
        self._leaving: set[str] = set()  # aborted while their rows are under way
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._blocks = BlockManager(
            num_blocks=config.num_kv_blocks,
            kv_block_size=config.kv_block_size,
            num_lookahead_tokens=proposer.num_lookahead_tokens,
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self._scheduler = Scheduler(config, self._blocks, proposer, lengths)
        self._requests: dict[str, Request] = {}
        self.handover = Handover(scheduler=self._scheduler, blocks=self._blocks, proposer=proposer)
        self._counter = RoundCounter(config=config, proposer=proposer, lengths=lengths)
        self._graph_report = GraphReport() if rounds is None else rounds.report
        self._pipeline = None
        if rounds is not None:
            self._pipeline = Pipeline(
                rounds, scheduler=self._scheduler, blocks=self._blocks, config=config
            )
        self._rounds = RoundsUnderWay(
            forwards=LocalForwards(target) if forwards is None else forwards,
            target=target,
            target_kv=target_kv,
            proposer=proposer,
            kv_block_size=config.kv_block_size,
            forced=forced,
            prefills=make_prefills(rounds, prefill_costs, self._pipeline),
            pipeline=self._pipeline,
        )

    @property
    def graph_report(self) -> GraphReport:
        """What captured graphs cost; all zero without any."""
        return self._graph_report

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight."""
        return bool(self._requests)

    @property
    def num_free_places(self) -> int:
        """How many more requests `add_request` takes now."""
        places = self.config.max_num_requests + self.config.max_num_waiting
        return max(0, places - len(self._requests))

    @property
    def is_runnable(self) -> bool:
        """Whether a step would run a round: requests that wait for KV alone run none."""
        return self._scheduler.has_runnable

    @property
    def num_steps(self) -> int:
        """Rounds that were run since the counters were cleared."""
        return self._counter.tally.num_steps

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """What the proposer keeps of a request beside KV."""
        return self._proposer.slot_state

    def find(self, request_id: str) -> Request | None:
        """Return a request in flight."""
        return self._requests.get(request_id)

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request.

        Raises:
            DiagnosticError: what `admit` raises.
        """
        admitted = self.admit(request)
        self._requests[request.request_id] = admitted
        self._scheduler.add(admitted)
        return Admission(request_id=request.request_id, seed=admitted.params.seed)

    def reserve(self, request: Request) -> bool:
        """Give an admitted request slot and blocks, to wait for KV; False while there is no room.

        It neither runs nor is preempted before `deliver`.
        """
        if not self._scheduler.reserve(request):
            return False
        if self._pipeline is not None:
            self._pipeline.settle()  # the writer of its blocks is no work of this device
            self._pipeline.expect([request])
        self._requests[request.request_id] = request
        return True

    def deliver(self, request_id: str, arrival: Arrival) -> tuple[RequestDelta, ...]:
        """Go on with a reserved request whose KV is in its blocks."""
        request = self._requests[request_id]
        self._counter.tally.num_prompt_tokens += request.num_prompt_tokens
        kept = keep_tokens(request, arrival.committed)
        self.handover.take(request, arrival)
        self._counter.tally.num_cached_tokens += request.num_cached_tokens or 0
        self._settle_blocks(request, request.num_prompt_tokens)
        return tuple(self._deliver([request], [kept], [arrival.logprobs]))

    def fail(self, request_id: str, problem: Diagnostic) -> RequestDelta:
        """End a request that has no rows under way with an error."""
        return self._fail(self._requests[request_id], problem)

    def retire(self, request_id: str) -> None:
        """Let go of a parked request; it was counted when it ended."""
        self._scheduler.remove(self._requests.pop(request_id))

    def admit(self, request: RequestInput, *, num_others: int = 0) -> Request:
        """Return a request with everything settled; it is not queued.

        Args:
            request: what is asked for.
            num_others: requests that wait for a place outside the engine.

        Raises:
            DiagnosticError: SD904 and SD908 to SD911 (what was asked for cannot run), SD914 (the
                queue is full).
        """
        refuse_known(request, self._requests)
        if self.num_free_places <= num_others:
            refuse_full(request, self.config, self._scheduler.num_waiting + num_others)
        return admit(request, self.config, self._tokenizer)

    def abort(self, request_id: str) -> bool:
        """Drop a request; no delta follows. False when it is not in flight.

        One whose rows are under way holds its blocks until they are through.
        """
        request = self._requests.get(request_id)
        if request is None or request_id in self._leaving:
            return False
        if request.placement is not None and request.placement.is_under_way:
            self._leaving.add(request_id)
        else:
            self._drop(request, "abort")
        return True

    @torch.inference_mode()
    def step(self, listener: RowsListener | None = None) -> tuple[RequestDelta, ...]:
        """Run one round and return what it added to each request.

        `listener` is told of rows before they are sent off and of every layer once launched.
        After a fault that is no request's nothing is under way, and requests are as they were.
        """
        try:
            return self._step(listener)
        except Exception:  # whatever it is, it is raised again, and no round goes on that it broke
            self._rounds.abandon()
            for request_id in self._leaving:
                self._drop(self._requests[request_id], "abort")
            self._leaving.clear()
            raise

    def _step(self, listener: RowsListener | None) -> tuple[RequestDelta, ...]:
        if self._pipeline is not None:
            if listener is None:
                self._rounds.start_behind(self._scheduler)
            if not self._pipeline.flights.is_prefill_next:
                results = self._pipeline.next_results()
                if results is not None:
                    return tuple(self._commit_results(results))
        failed: list[RequestDelta] = []
        for _ in range(self._rounds.num_missing):
            plan = self._scheduler.schedule(num_parts=self._rounds.num_parts)
            if not plan.requests:
                break
            failed += self._fail_all(self._rounds.start(plan, listener))
        has_progress = bool(self._rounds) or bool(failed)
        may_wait = self.handover.is_holding or not self._requests
        assert has_progress or may_wait, "no request in flight can be scheduled"
        while self._rounds:
            started, done, blamed = self._rounds.finish(listener)
            failed += self._fail_all(blamed)
            if done is not None:
                return (*failed, *self._commit(done, started))
        return tuple(failed)

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        return self._counter.tally.snapshot(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_kv_blocks=self._blocks.num_usable_blocks,
            num_free_kv_blocks=self._blocks.num_free_blocks,
            num_cached_kv_blocks=self._blocks.num_cached_blocks,
            graphs=self._graph_report,
        )

    def flush_cache(self) -> None:
        """Clear prefix index and counters; requests go on, and no memory that graphs know moves."""
        self._blocks.flush()
        self._scheduler.num_preemptions = 0
        self._counter.reset()

    def close(self) -> None:
        """Give up what other stages hold for this engine, and its thread; nobody calls it later."""
        self._rounds.close()
        if self._pipeline is not None:
            self._pipeline.close()

    def check(self) -> None:
        """Assert that blocks, slots and queues agree; for tests and idle moments."""
        placed = self._scheduler.placed
        tables = [request.placed.table for request in placed]
        self._blocks.check([*tables, *self.handover.held_tables])
        slots = [request.placed.slot for request in placed]
        assert len(set(slots)) == len(slots), f"two requests share a slot: {slots}"
        known = {id(request) for request in self._requests.values()}
        queued = [id(request) for request in self._scheduler]
        assert len(queued) == len(known), "a request is queued twice or not at all"
        assert set(queued) == known, "the queues hold other requests than the engine"

    def _commit(self, done: Round, started: StartedRound) -> list[RequestDelta]:
        """Take a round's tokens in, tell the proposer, name full blocks, end what is done."""
        rows = done.rows
        self._counter.count(done, started.plan)
        kept = [
            keep_tokens(request, committed)
            for request, committed in zip(rows.yielding, done.result.committed, strict=True)
        ]
        tell_proposer(self._proposer, done)
        for span in rows.spans:
            span.request.placed.num_final_rows = span.num_final_rows
            span.request.placed.received = None
            self._settle_blocks(span.request, span.start + span.num_final_rows)
        deltas = self._deliver(rows.yielding, kept, done.result.logprobs)
        return self._without_leaving(started.plan.requests, deltas) if self._leaving else deltas

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

    def _commit_results(self, found: Sequence[LaneResult]) -> list[RequestDelta]:
        """Take in what a round on the device yielded; the draft has observed it already."""
        failed = [
            self._fail(lane.request, lane.problem) for lane in found if lane.problem is not None
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

    def _fail_all(self, blamed: Sequence[Blamed]) -> list[RequestDelta]:
        return [self._fail(item.request, item.problem) for item in blamed]

    def _fail(self, request: Request, problem: Diagnostic) -> RequestDelta:
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

    def _drop(self, request: Request, reason: FinishReason) -> None:
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        self._counter.tally.finished[reason] += 1
