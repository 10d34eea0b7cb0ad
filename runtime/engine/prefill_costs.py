"""Whether prompts that came at once are prefilled in turn by graphs or together, kernel by kernel.

A graph of one prompt costs no launches, but reads every weight for that prompt alone; an eager
forward of all prompts reads them once and costs its launches, whatever its rows. Which is less
follows the model and the machine, so both are measured when an engine starts. For SmolLM2-135M on
an H200 a graph took 1.4 ms and a joint forward 14 to 20: ten prompts go in turn. Of an 8B shape a
graph of 128 rows takes 12 and eight prompts together 33: three do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.graphs.prefill import PrefillShape

MOST_IN_TURN = 4
"""Prompts that go in turn at most where nothing was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCosts:
    """Seconds of prefills, measured.

    Args:
        graph_s: of one prompt as a graph, by its size.
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

    def is_in_turn(self, shapes: Sequence[PrefillShape | None], num_rows: Sequence[int]) -> bool:
        """Return whether prompts cost less in turn.

        Args:
            shapes: of each prompt; None: no graph runs it, so it is left for an eager forward.
            num_rows: of each prompt.
        """
        in_turn_s, num_left = 0.0, 0
        for shape, rows in zip(shapes, num_rows, strict=True):
            if shape is None:
                num_left += rows
            else:
                in_turn_s += self.graph_s[shape]
        if num_left:
            in_turn_s += self.joint_s(num_left)
        return in_turn_s <= self.joint_s(sum(num_rows))


def measured_costs(
    graph_s: Mapping[PrefillShape, float], eager_s: tuple[tuple[int, float], ...]
) -> PrefillCosts | None:
    """Return costs where both ways were measured; a runner given from outside times no graph."""
    return PrefillCosts(graph_s=graph_s, eager_s=eager_s) if graph_s and eager_s else None
