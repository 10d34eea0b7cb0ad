"""Rounds whose forwards were sent off, and who is to blame when one of them fails.

A `DiagnosticError` whose place is `request=<id>` takes that request out of its round; the round
runs again without it, behind what is under way. Any other fault is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.engine.forwards import Forwards, RowsListener
from runtime.engine.pipeline import Pipeline
from runtime.engine.prefills import DevicePrefills
from runtime.engine.prepare import PackedRound
from runtime.engine.request import Request
from runtime.engine.round import Round, StartedRound, finish_round, start_round
from runtime.engine.scheduler import Plan, Scheduler
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.forced import ForcedLengths
from runtime.spec.types import Proposer
from specctl.contract.diagnostics import Diagnostic, DiagnosticError


@dataclass(frozen=True, kw_only=True, slots=True)
class Blamed:
    """A request that a fault names."""

    request: Request
    problem: Diagnostic


class RoundsUnderWay:
    """Starts rounds and finishes them in order."""

    def __init__(
        self,
        *,
        forwards: Forwards,
        target: TargetModel,
        target_kv: Sequence[KVLayer],
        proposer: Proposer,
        kv_block_size: int,
        forced: ForcedLengths | None,
        prefills: DevicePrefills | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Have nothing under way.

        Args:
            forwards: runs the target's forwards.
            target: the stage that commits.
            target_kv: its cache layers.
            proposer: who drafts.
            kv_block_size: tokens of a KV block.
            forced: decides what rounds accept; None: the target does.
            prefills: runs prefills on the device; None: all of them are eager.
            pipeline: the engine's own, behind whose rounds prefills may run.
        """
        self._forwards = forwards
        self._target = target
        self._target_kv = tuple(target_kv)
        self._proposer = proposer
        self._kv_block_size = kv_block_size
        self._forced = forced
        self._prefills = prefills
        self._pipeline = pipeline
        self._started: deque[StartedRound] = deque()

    def __len__(self) -> int:
        """Return how many rounds are under way."""
        return len(self._started)

    @property
    def num_missing(self) -> int:
        """Rounds that would keep further stages at work."""
        return max(0, self._forwards.depth - len(self._started))

    @property
    def num_parts(self) -> int:
        """Rounds over which decoding requests are spread."""
        return self._forwards.depth

    def start(self, plan: Plan, listener: RowsListener | None = None) -> list[Blamed]:
        """Start a round of a plan, without the requests that its drafts fail for.

        Args:
            plan: a prefill that the device can run alone goes first; other requests of its plan
                then wait for the next one.
            listener: hears of its rows before they are sent off; its forward is eager then.
        """
        if self._prefills is not None and listener is None and not self._started:
            group = self._prefills.choose(plan.prefills)
            if group is not None:
                self._started.append(self._prefills.start(plan, group))
                return []
        blamed: list[Blamed] = []
        while plan.requests:
            try:
                started = start_round(
                    plan,
                    forwards=self._forwards,
                    proposer=self._proposer,
                    target_kv=self._target_kv,
                    kv_block_size=self._kv_block_size,
                    target_vocab_size=self._target.facts.vocab_size,
                    device=self._target.device,
                    on_sent_off=None if listener is None else listener.on_sent_off,
                )
            except DiagnosticError as error:
                found = _blamed(error, plan.requests)
                plan = plan.without(tuple(item.request for item in found))
                blamed += found
            else:
                self._started.append(started)
                break
        return blamed

    def start_behind(self, scheduler: Scheduler) -> None:
        """Launch a prefill of waiting requests behind the pipeline's rounds, if they may start."""
        pipeline, prefills = self._pipeline, self._prefills
        if pipeline is None or prefills is None or self._started or not pipeline.may_prefill:
            return
        works = scheduler.newcomers()
        group = prefills.choose(works)
        if group is not None:
            self._started.append(prefills.start(scheduler.plan_prefills(works), group))
            pipeline.flights.begin_prefill()

    def finish(
        self, listener: RowsListener | None = None
    ) -> tuple[StartedRound, Round | None, list[Blamed]]:
        """Wait for the oldest round.

        Args:
            listener: told of every layer of its forward.

        Returns:
            The round, what it yielded, and whom a fault names; after a fault there is no yield, and
            what is left of the round was started again.
        """
        started = self._started.popleft()
        if self._prefills is not None and not isinstance(started.rows, PackedRound):
            self._end_prefill(is_read=True)
            return started, self._prefills.finish(started), []
        try:
            done = finish_round(
                started,
                forwards=self._forwards,
                target=self._target,
                proposer=self._proposer,
                forced=self._forced,
                on_rows=None if listener is None else listener.on_layer,
            )
        except DiagnosticError as error:
            blamed = _blamed(error, started.plan.requests)
            rest = started.plan.without(tuple(item.request for item in blamed))
            again = self.start(rest, listener)
            return started, None, [*blamed, *again]
        return started, done, []

    def abandon(self) -> None:
        """Let every round go that is under way: a fault that is no request's ended one of them."""
        while self._started:
            for placed in self._started.popleft().placements:
                placed.is_under_way = False
        self._end_prefill(is_read=False)
        self._forwards.abandon()

    def _end_prefill(self, *, is_read: bool) -> None:
        if self._pipeline is not None:
            self._pipeline.end_prefill(is_read=is_read)

    def close(self) -> None:
        """Let every round go, and what other stages hold for them."""
        self.abandon()
        self._forwards.close()


def _blamed(error: DiagnosticError, requests: Sequence[Request]) -> list[Blamed]:
    """Return the requests that an error names, each with its first problem.

    Raises:
        DiagnosticError: `error` itself, when it names none of them.
    """
    problems: dict[str, Diagnostic] = {}
    for problem in error.diagnostics:
        problems.setdefault(problem.where, problem)
    found = [
        Blamed(request=request, problem=problems[place])
        for request in requests
        if (place := f"request={request.request_id}") in problems
    ]
    if not found:
        raise error
    return found
