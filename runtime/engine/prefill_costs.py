"""Whether prompts that came at once are prefilled by graphs or by one forward, kernel by kernel.

A graph costs no launches, but computes all of its rows; an eager forward of all prompts costs its
launches, whatever its rows. Which is less follows the model and the machine, so both are measured
when an engine starts. For SmolLM2-135M on an H200 a graph of one short prompt took 1.4 ms and a
joint forward 14 to 20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.graphs.prefill import PrefillShape

MOST_IN_TURN = 4
"""Graphs of one step at most where nothing was measured."""
_LAUNCH_ROWS = 64
"""Rows that a graph costs besides its own where nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillGroup:
    """Prompts that run as one graph.

    Args:
        shape: of the graph.
        num_prompts: the next ones in order, one or more.
    """

    shape: PrefillShape
    num_prompts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCosts:
    """Seconds of prefills, measured.

    Args:
        graph_s: of a graph, by its size.
        eager_s: (rows, seconds) of eager forwards of several prompts, rows ascending, one or more.
    """

    graph_s: Mapping[PrefillShape, float]
    eager_s: tuple[tuple[int, float], ...]

    def joint_s(self, num_rows: int) -> float:
        """Return the seconds of an eager forward, between the measured ones by a straight line."""
        (before, seconds), *others = self.eager_s
        if num_rows <= before:
            return seconds
        for rows, later in others:
            if num_rows <= rows:
                return seconds + (later - seconds) * (num_rows - before) / (rows - before)
            before, seconds = rows, later
        return seconds * num_rows / before

    def is_cheaper(self, groups: Sequence[PrefillGroup], num_rows: Sequence[int]) -> bool:
        """Return whether prompts cost less by graphs.

        Args:
            groups: of the first ones; the others are left for an eager forward.
            num_rows: of each prompt.
        """
        seconds = sum(self.graph_s[group.shape] for group in groups)
        num_left = sum(num_rows[sum(group.num_prompts for group in groups) :])
        if num_left:
            seconds += self.joint_s(num_left)
        return seconds <= self.joint_s(sum(num_rows))


def graph_groups(
    shapes: Sequence[PrefillShape],
    prompts: Sequence[tuple[int, int]],
    costs: PrefillCosts | None = None,
) -> tuple[PrefillGroup, ...]:
    """Divide prompts among graphs, in order, up to the first one that none holds.

    Each graph is the one that costs least for a row of a prompt.

    Args:
        shapes: that are captured.
        prompts: (rows, last position + 1) of each.
        costs: of the graphs; None: they cost their rows and a little more.
    """
    groups: list[PrefillGroup] = []
    left = list(prompts)
    while left:
        num_rows, ends = zip(*left, strict=True)
        found = [
            PrefillGroup(shape=shape, num_prompts=count)
            for shape in shapes
            if (count := shape.num_fitting(num_rows, ends))
        ]
        if not found:
            break
        groups.append(min(found, key=lambda group: _row_cost(group, num_rows, costs)))
        del left[: groups[-1].num_prompts]
    return tuple(groups)


def _row_cost(
    group: PrefillGroup, num_rows: Sequence[int], costs: PrefillCosts | None
) -> tuple[float, int]:
    """Return what a row of the group's prompts costs; of equal ones the smaller context is less."""
    shape = group.shape
    whole = shape.num_rows + _LAUNCH_ROWS if costs is None else costs.graph_s[shape]
    return whole / sum(num_rows[: group.num_prompts]), shape.context


def measured_costs(
    graph_s: Mapping[PrefillShape, float], eager_s: tuple[tuple[int, float], ...]
) -> PrefillCosts | None:
    """Return costs where both ways were measured; a runner given from outside times no graph."""
    return PrefillCosts(graph_s=graph_s, eager_s=eager_s) if graph_s and eager_s else None
