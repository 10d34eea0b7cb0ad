"""All stages of a target in one process: the same stages, one after the other, with a hand-off.

What one stage hands to the next is copied, as it would be between processes, so the cost of a
hand-off can be measured on one GPU. Nothing waits for the host: a round that runs these stages can
be captured, and its hand-offs are buffers of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.batch import PreparedBatch
from runtime.kv import KVLayer
from runtime.models.target import StageStates, TargetModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagedTarget(TargetModel):
    """A whole target whose forward runs stage by stage.

    Args:
        stages: in order; together all layers.
    """

    stages: tuple[TargetModel, ...]

    @classmethod
    def join(cls, stages: Sequence[TargetModel]) -> StagedTarget:
        """Return the target that these stages are; they keep their weights."""
        first, last = stages[0], stages[-1]
        assert first.embedding is not None, "the first stage embeds"
        assert last.head is not None, "the last stage has the head"
        return cls(
            facts=first.facts,
            first_layer=0,
            layers=tuple(layer for stage in stages for layer in stage.layers),
            embedding=first.embedding,
            norm_D=last.norm_D,
            head=last.head,
            cos_sin_TP=last.cos_sin_TP,
            stages=tuple(stages),
        )

    def run_stage(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...] = (),
        states: StageStates | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> StageStates:
        """Run every stage; see `TargetModel.run_stage`.

        Exactness: a hand-off is a copy. Graph-safe: yes.
        """
        assert states is None, "the first stage embeds"
        first = 0
        for stage in self.stages:
            if states is not None:
                states = _handed_over(states)
            layers = kv[first : first + stage.num_layers]
            states = stage.run_stage(batch, layers, aux_layer_ids, states, on_layer)
            first += stage.num_layers
        assert states is not None, "there is a stage"
        return states


def _handed_over(states: StageStates) -> StageStates:
    return StageStates(
        residual_ND=states.residual_ND.clone(),
        captured={index: state.clone() for index, state in states.captured.items()},
    )
