"""Prefills that run on the device as rounds do, without host reads in between.

A step whose prompts cost less by graphs (`runtime.engine.prefill_costs`) runs the first ones that a
captured size holds; the others and the requests that decode wait for the next steps. Whatever does
not fit (a chunk that is not the last one, options of which rounds on the device know nothing) stays
on the eager path, with the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from runtime.engine.device_rounds import DeviceRounds
from runtime.engine.pipeline import Pipeline
from runtime.engine.prefill_costs import (
    MOST_IN_TURN,
    PrefillCosts,
    PrefillGroup,
    graph_groups,
)
from runtime.engine.prepare import RowSpan, StepRows
from runtime.engine.request import Request
from runtime.engine.round import Round, StartedRound, under_way
from runtime.engine.scheduler import Plan, PrefillWork
from runtime.engine.slot_params import prefill_kind, round_kind, slot_sampling
from runtime.graphs.prefill import PrefillInput, PrefillState, first_rows
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
        expect: Callable[[Sequence[Request]], None],
    ) -> None:
        """Start with nothing under way.

        Args:
            runner: runs prefills over `state`.
            state: what they read and write.
            proposer: the engine's own.
            costs: what decides how prompts of one step run; None: the number of graphs does.
            expect: told of the requests of a prefill once that was launched.
        """
        self._expect = expect
        self._runner = runner
        self._state = state
        self._proposer = proposer
        self._costs = costs

    def choose(self, works: Sequence[PrefillWork]) -> PrefillGroup | None:
        """Return how the first of these prompts run as a graph; None where all run eagerly."""
        able = tuple(itertools.takewhile(_may_run, works))
        prompts = [(work.num_rows, work.start + work.num_rows) for work in able]
        kind = round_kind([work.request.params for work in able])
        if kind is None:
            return None
        every = self._runner.prefill_shapes
        shapes = [shape for shape in every if shape.kind == prefill_kind(kind)]
        groups = graph_groups(shapes, prompts, self._costs)
        if not groups:
            return None
        if self._costs is None:
            all_run = sum(group.num_prompts for group in groups) == len(works)
            return groups[0] if all_run and len(groups) <= MOST_IN_TURN else None
        is_cheaper = self._costs.is_cheaper(groups, [work.num_rows for work in works])
        return groups[0] if is_cheaper else None

    def start(self, plan: Plan, group: PrefillGroup) -> StartedRound:
        """Launch a prefill of the first prompts of a plan; the others are left out of it.

        Args:
            plan: whose prompts were divided.
            group: what `choose` returned for them.

        Sync: none.
        """
        works = plan.prefills[: group.num_prompts]
        requests = tuple(work.request for work in works)
        others = [work.request for work in plan.decodes]
        others += [work.request for work in plan.prefills[group.num_prompts :]]
        self._state.write(
            group.shape,
            [
                PrefillInput(
                    slot=work.request.placed.slot,
                    start=work.start,
                    ids_target=work.request.ids_target[work.start : work.start + work.num_rows],
                    blocks=work.request.placed.table.blocks,
                    sampling=slot_sampling(work.request.params),
                )
                for work in works
            ],
        )
        self._runner.launch_prefill(group.shape)
        self._expect(requests)
        return under_way(
            plan.without(tuple(others)),
            StepRows(spans=_spans(works), yielding=requests, decoding=()),
        )

    def finish(self, started: StartedRound) -> Round:
        """Return the prefill that was launched; no request changes.

        Sync: one.
        """
        for placed in started.placements:
            placed.is_under_way = False
        tokens = self._runner.read_prefill(len(started.rows.yielding))
        return Round(
            rows=started.rows,
            result=RoundResult(
                committed=tuple((token,) for token in tokens),
                num_drafts=(0,) * len(tokens),
                num_accepted_drafts=(0,) * len(tokens),
            ),
            draft=self._proposer,
        )


def _may_run(work: PrefillWork) -> bool:
    """Whether a graph can run a prompt that it holds."""
    request = work.request
    return work.is_last and request.masks is None and request.params.device_kind is not None


def _spans(works: Sequence[PrefillWork]) -> tuple[RowSpan, ...]:
    """Return the rows of each prompt, as they lie in a prefill."""
    rows = first_rows(work.num_rows for work in works)
    return tuple(
        RowSpan(request=work.request, first_row=row, start=work.start, num_rows=work.num_rows)
        for work, row in zip(works, rows, strict=True)
    )


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
        rounds.runner, rounds.round_.prefill, rounds.proposer, costs, pipeline.slots.expect
    )
