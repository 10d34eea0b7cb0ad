"""Which heads of which layers travel from which prefill rank to which decode rank.

Both sides split layers over stages and KV heads over tensor-parallel ranks, each in its own way.
The plan follows from the two splits alone: every (layer, head) of the decode side is sent exactly
once to every rank that holds it. Draft layers are numbered after the target's and live on last
stages, split over their ranks or whole on each.

*Source:* head h of a layer is on rank h * tp // num_kv_heads of its stage, as the layers are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.parallel.layout import ParallelLayout
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """How one side holds KV.

    Args:
        name: `prefill` or `decode`, for messages.
        stage_layers: target layers of each stage.
        tensor_parallel: ranks of a stage.
        is_draft_split: whether the draft's heads are split over them, or whole on each.
    """

    name: str
    stage_layers: tuple[int, ...]
    tensor_parallel: int
    is_draft_split: bool = True

    def stage_of(self, layer: int) -> int:
        """Return the stage of a target layer; layers beyond them are the draft's, on the last."""
        end = 0
        for stage, count in enumerate(self.stage_layers):
            end += count
            if layer < end:
                return stage
        return len(self.stage_layers) - 1

    def split_of(self, layer: int) -> int:
        """Return over how many ranks a layer's heads are split."""
        is_draft = layer >= sum(self.stage_layers)
        return 1 if is_draft and not self.is_draft_split else self.tensor_parallel

    def rank(self, stage: int, tp_rank: int) -> int:
        """Return the world rank of a place."""
        layout = ParallelLayout(
            pipeline_parallel=len(self.stage_layers), tensor_parallel=self.tensor_parallel
        )
        return layout.rank(stage, tp_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMove:
    """Consecutive heads of one layer that go from one rank to another.

    Args:
        layer: target layers first, then the draft's.
        source: world rank on the prefill side.
        destination: world rank on the decode side.
        source_head: first head, counted within the source rank.
        destination_head: first head, counted within the destination rank.
        num_heads: how many.
    """

    layer: int
    source: int
    destination: int
    source_head: int
    destination_head: int
    num_heads: int


def plan_moves(prefill: Side, decode: Side, kv_heads: Sequence[int]) -> tuple[HeadMove, ...]:
    """Return every move between two sides, by layer, then by head.

    Args:
        prefill: where KV is made.
        decode: where it goes.
        kv_heads: KV heads of each target layer, then of each draft layer.

    Raises:
        DiagnosticError: SD862, the ranks of a side do not divide the heads of a layer, or the sides
            have other numbers of target layers.
    """
    problems = [
        problem
        for side in (prefill, decode)
        for layer, heads in enumerate(kv_heads)
        if heads % side.split_of(layer)
        for problem in [_indivisible(side, layer, heads)]
    ]
    if sum(prefill.stage_layers) != sum(decode.stage_layers):
        problems.append(_other_layers(prefill, decode))
    if problems:
        raise DiagnosticError(problems)
    return tuple(
        move
        for layer, heads in enumerate(kv_heads)
        for move in _layer_moves(prefill, decode, layer, heads)
    )


def _layer_moves(prefill: Side, decode: Side, layer: int, heads: int) -> list[HeadMove]:
    per_source = heads // prefill.split_of(layer)
    per_destination = heads // decode.split_of(layer)
    count = min(per_source, per_destination)
    if max(per_source, per_destination) % count:
        count = 1  # ranges that do not nest: head by head
    return [
        HeadMove(
            layer=layer,
            source=prefill.rank(prefill.stage_of(layer), sender),
            destination=decode.rank(decode.stage_of(layer), receiver),
            source_head=head % per_source,
            destination_head=head % per_destination,
            num_heads=count,
        )
        for head in range(0, heads, count)
        for receiver in _holders(decode, layer, head // per_destination)
        for sender in [_sender(prefill, decode, layer, head // per_source, receiver)]
    ]


def _holders(side: Side, layer: int, part: int) -> Sequence[int]:
    """Return the ranks of a stage that hold a part of a layer's heads."""
    return (part,) if side.split_of(layer) > 1 else range(side.tensor_parallel)


def _sender(prefill: Side, decode: Side, layer: int, part: int, receiver: int) -> int:
    """Return the rank that sends a part to a receiver: where each has all, they take turns."""
    if prefill.split_of(layer) > 1:
        return part
    return receiver * prefill.tensor_parallel // decode.tensor_parallel


def _indivisible(side: Side, layer: int, heads: int) -> Diagnostic:
    return diagnose(
        "SD862",
        where=f"handshake, {side.name}, layer {layer}",
        message=f"{heads} KV heads do not divide over {side.split_of(layer)} ranks",
        expected=f"a divisor of {heads}",
        found=side.split_of(layer),
    )


def _other_layers(prefill: Side, decode: Side) -> Diagnostic:
    return diagnose(
        "SD862",
        where="handshake, layers",
        message="the two sides split another number of target layers",
        expected=sum(prefill.stage_layers),
        found=sum(decode.stage_layers),
    )
