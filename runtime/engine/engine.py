"""The engine: requests in, deltas out, one round a step.

`step` is schedule -> run a round -> commit. Tokens change in the commit only, so a round that fails
leaves every request as it was: a `DiagnosticError` whose place is `request=<id>` ends that request,
and the round is run again without it; any other fault is the caller's. Tokens that are committed
are delivered: a draft that fails to observe them lets the next step raise.
Invariants: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from runtime.config import RuntimeConfig
from runtime.engine.admission import admit, refuse_full, refuse_known
from runtime.engine.block_manager import BlockManager
from runtime.engine.counting import RoundCounter
from runtime.engine.device_rounds import DeviceRounds
from runtime.engine.forwards import Forwards, LocalForwards, RowsListener
from runtime.engine.handover import Arrival, Handover
from runtime.engine.pipeline import Pipeline
from runtime.engine.prefill_costs import PrefillCosts
from runtime.engine.prefills import make_prefills
from runtime.engine.request import Admission, Request, RequestDelta, RequestInput
from runtime.engine.roster import Roster
from runtime.engine.scheduler import Scheduler
from runtime.engine.stats import EngineStats
from runtime.engine.under_way import RoundsUnderWay
from runtime.graphs.capture import GraphReport
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.adaptive import DraftLengths, StaticLengths
from runtime.spec.forced import ForcedLengths
from runtime.spec.types import Proposer, SlotTensor
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
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._blocks = BlockManager(
            num_blocks=config.num_kv_blocks,
            kv_block_size=config.kv_block_size,
            num_lookahead_tokens=proposer.num_lookahead_tokens,
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self._scheduler = Scheduler(config, self._blocks, proposer, lengths)
        self.handover = Handover(scheduler=self._scheduler, blocks=self._blocks, proposer=proposer)
        self._counter = RoundCounter(config=config, proposer=proposer, lengths=lengths)
        self._roster = Roster(
            scheduler=self._scheduler,
            blocks=self._blocks,
            proposer=proposer,
            handover=self.handover,
            counter=self._counter,
        )
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
        """Whether a request is in flight, or a fault is to be raised behind its tokens."""
        return bool(self._roster) or self._roster.has_fault

    @property
    def num_free_places(self) -> int:
        """How many more requests `add_request` takes now."""
        places = self.config.max_num_requests + self.config.max_num_waiting
        return max(0, places - len(self._roster))

    @property
    def is_runnable(self) -> bool:
        """Whether a step would run a round: requests that wait for KV alone run none."""
        return self._scheduler.has_runnable or self._roster.has_fault

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
        return self._roster.find(request_id)

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request.

        Raises:
            DiagnosticError: what `admit` raises.
        """
        admitted = self.admit(request)
        self._roster.add(admitted)
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
            self._pipeline.slots.expect([request])
        self._roster.add(request)
        return True

    def deliver(self, request_id: str, arrival: Arrival) -> tuple[RequestDelta, ...]:
        """Go on with a reserved request whose KV is in its blocks."""
        return tuple(self._roster.commit_arrival(request_id, arrival))

    def fail(self, request_id: str, problem: Diagnostic) -> RequestDelta:
        """End a request that has no rows under way with an error."""
        return self._roster.fail(self._roster[request_id], problem)

    def retire(self, request_id: str) -> None:
        """Let go of a parked request; it was counted when it ended."""
        self._roster.retire(request_id)

    def admit(self, request: RequestInput, *, num_others: int = 0) -> Request:
        """Return a request with everything settled; it is not queued.

        Args:
            request: what is asked for.
            num_others: requests that wait for a place outside the engine.

        Raises:
            DiagnosticError: SD904 and SD908 to SD911 (what was asked for cannot run), SD914 (the
                queue is full).
        """
        refuse_known(request, self._roster)
        if self.num_free_places <= num_others:
            refuse_full(request, self.config, self._scheduler.num_waiting + num_others)
        return admit(request, self.config, self._tokenizer)

    def abort(self, request_id: str) -> bool:
        """Drop a request; no delta follows. False when it is not in flight.

        One whose rows are under way holds its blocks until they are through.
        """
        return self._roster.abort(request_id)

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
            self._roster.abandon()
            raise

    def _step(self, listener: RowsListener | None) -> tuple[RequestDelta, ...]:
        self._roster.raise_fault()
        if self._pipeline is not None:
            if listener is None:
                self._rounds.start_behind(self._scheduler)
            if not self._pipeline.flights.is_prefill_next:
                results = self._pipeline.next_results()
                if results is not None:
                    return tuple(self._roster.commit_results(results))
        failed: list[RequestDelta] = []
        for _ in range(self._rounds.num_missing):
            plan = self._scheduler.schedule(num_parts=self._rounds.num_parts)
            if not plan.requests:
                break
            failed += self._roster.fail_all(self._rounds.start(plan, listener))
        has_progress = bool(self._rounds) or bool(failed)
        may_wait = self.handover.is_holding or not self._roster
        assert has_progress or may_wait, "no request in flight can be scheduled"
        while self._rounds:
            started, done, blamed = self._rounds.finish(listener)
            failed += self._roster.fail_all(blamed)
            if done is not None:
                return (*failed, *self._roster.commit(done, started))
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
        known = {id(request) for request in self._roster}
        queued = [id(request) for request in self._scheduler]
        assert len(queued) == len(known), "a request is queued twice or not at all"
        assert set(queued) == known, "the queues hold other requests than the engine"
