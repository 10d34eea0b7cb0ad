"""Prefills of one request that run on the device as rounds do, without host reads in between.

A step whose prefills cost less in turn (`runtime.engine.prefill_costs`) runs the first one alone if
it is in reach of the captured sizes: the others and the requests that decode wait for the next
steps. Whatever does not fit (many prompts at once, a chunk that is not the last one, options that
need more than the argmax) stays on the eager path, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.engine.device_rounds import DeviceRounds
from runtime.engine.pipeline import Pipeline
from runtime.engine.prefill_costs import MOST_IN_TURN, PrefillCosts
from runtime.engine.prepare import RowSpan, StepRows
from runtime.engine.request import Request
from runtime.engine.round import Round, StartedRound, under_way
from runtime.engine.scheduler import Plan, PrefillWork
from runtime.graphs.prefill import PrefillInput, PrefillShape, PrefillState
from runtime.graphs.round import RoundRunner
from runtime.spec.types import PrefillProposer, RoundResult


class DevicePrefills:
    """Runs prefills over the slots of one engine; one is under way at most."""

    def __init__(
        self,
        runner: RoundRunner,
        state: PrefillState,
        proposer: PrefillProposer,
        costs: PrefillCosts | None,
        expect: Callable[[Request], None],
    ) -> None:
        """Start with nothing under way.

        Args:
            runner: runs prefills over `state`.
            state: what they read and write.
            proposer: the engine's own.
            costs: what decides how prompts of one step run; None: their number does.
            expect: told of the request of a prefill once that was launched.
        """
        self._expect = expect
        self._runner = runner
        self._state = state
        self._proposer = proposer
        self._costs = costs

    def start(self, plan: Plan) -> StartedRound | None:
        """Launch the first prefill of a plan; None: the plan is the eager path's.

        Sync: none.
        """
        if not plan.prefills:
            return None
        work = plan.prefills[0]
        shape = self._shape(work)
        if shape is None or not self._is_in_turn(plan.prefills):
            return None
        request, end = work.request, work.start + work.num_rows
        self._state.write(
            PrefillInput(
                slot=request.placed.slot,
                start=work.start,
                ids_target=request.ids_target[work.start : end],
                blocks=request.placed.table.blocks,
            )
        )
        self._runner.launch_prefill(shape)
        self._expect(request)
        span = RowSpan(request=request, first_row=0, start=work.start, num_rows=work.num_rows)
        return under_way(
            plan.without(tuple(other for other in plan.requests if other is not request)),
            StepRows(spans=(span,), yielding=(request,), decoding=()),
        )

    def finish(self, started: StartedRound) -> Round:
        """Return the prefill that was launched; no request changes.

        Sync: one.
        """
        for placed in started.placements:
            placed.is_under_way = False
        return Round(
            rows=started.rows,
            result=RoundResult(
                committed=((self._runner.read_prefill(),),),
                num_drafts=(0,),
                num_accepted_drafts=(0,),
            ),
            draft=self._proposer,
        )

    def _is_in_turn(self, works: Sequence[PrefillWork]) -> bool:
        """Return whether the prompts of a step go one after the other."""
        if self._costs is None:
            return len(works) <= MOST_IN_TURN
        return self._costs.is_in_turn(
            [self._shape(work) for work in works], [work.num_rows for work in works]
        )

    def _shape(self, work: PrefillWork) -> PrefillShape | None:
        """Return the smallest size that holds the rows; None where none does."""
        request = work.request
        is_plain = request.masks is None and request.params.device_kind == "greedy"
        if not is_plain or not work.is_last:
            return None
        fitting = (
            shape
            for shape in self._runner.prefill_shapes
            if shape.num_rows >= work.num_rows and shape.context >= work.start + work.num_rows
        )
        return min(fitting, key=lambda shape: (shape.num_rows, shape.context), default=None)


def make_prefills(
    rounds: DeviceRounds | None, costs: PrefillCosts | None, pipeline: Pipeline | None
) -> DevicePrefills | None:
    """Return what runs prefills on the device before a pipeline's rounds; None: all are eager."""
    if (
        rounds is None
        or pipeline is None
        or rounds.round_.prefill is None
        or not rounds.runner.prefill_shapes
    ):
        return None
    assert isinstance(rounds.proposer, PrefillProposer), "such a state is made for one only"
    return DevicePrefills(
        rounds.runner, rounds.round_.prefill, rounds.proposer, costs, pipeline.expect
    )
