"""Which layers, embedding, head and draft each pipeline stage holds, and how many bytes that is.

One rule for `specctl plan` and for the runtime: the split follows from the manifest and the number
of stages alone, so every process of a run computes the same one. The draft runs on the last stage,
unsplit; its input embedding is there whenever the target's is not.
*Source:* the balance is the classic linear partition: contiguous layers, the heaviest stage as
light as possible; among equals the one whose earlier stages are lighter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.manifest import Manifest

DraftEmbedding = Literal["own", "target", "head", "checkpoint"]
"""Where the draft's input embedding on the last stage comes from: a tensor of the draft; the
target's embedding, when that stage holds it; the target's head, which is the embedding when tied;
or the target's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What one pipeline stage holds.

    Args:
        index: 0 is the first.
        first_layer: of the target, 0-based.
        num_layers: consecutive layers from there on.
        has_embedding: it embeds the target's input.
        has_head: it ends in the target's final norm and head, and runs the draft.
        draft_embedding: None on a stage without a draft.
        target_bytes: stored bytes of layers, embedding and head.
        draft_bytes: stored bytes of the draft, its own copy of the embedding included.
    """

    index: int
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    draft_embedding: DraftEmbedding | None
    target_bytes: int
    draft_bytes: int

    @property
    def end_layer(self) -> int:
        """One past the last layer."""
        return self.first_layer + self.num_layers

    @property
    def num_bytes(self) -> int:
        """Stored bytes of everything on the stage."""
        return self.target_bytes + self.draft_bytes


def split_stages(
    manifest: Manifest, num_stages: int, *, stage_layers: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Return the stages of a target and its draft, in order.

    Args:
        manifest: sizes and sharing.
        num_stages: 1 or more.
        stage_layers: layers of each stage; None balances bytes.

    Raises:
        DiagnosticError: SD850 (more stages than layers), SD851 (layers that do not add up).
    """
    num_layers = manifest.target.decoder.num_layers
    if not 1 <= num_stages <= num_layers:
        raise DiagnosticError(
            diagnose(
                "SD850",
                where="--pp",
                message=f"{num_stages} stages, {num_layers} layers: a stage needs one at least",
                expected=f"1 to {num_layers}",
                found=num_stages,
            )
        )
    if stage_layers is None:
        counts = _balanced(manifest, num_stages)
    else:
        counts = _given(stage_layers, num_stages, num_layers)
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(_stage(manifest, index, num_stages, first, count))
        first += count
    return tuple(stages)


def draft_embedding(manifest: Manifest, num_stages: int) -> DraftEmbedding | None:
    """Return where the last of `num_stages` stages takes the draft's input embedding from."""
    if manifest.draft is None or manifest.sharing is None:
        return None
    if num_stages == 1:
        return manifest.sharing.embedding_single_stage
    if manifest.sharing.embedding_multi_stage == "own":
        return "own"
    return "head" if manifest.target.is_head_tied else "checkpoint"


def _stage(manifest: Manifest, index: int, num_stages: int, first: int, count: int) -> Stage:
    parallel = manifest.parallel
    is_first, is_last = index == 0, index == num_stages - 1
    origin = draft_embedding(manifest, num_stages) if is_last else None
    layers = sum(parallel.layer_bytes[first : first + count])
    head = parallel.head_bytes if is_last else 0
    if is_first and is_last and manifest.target.is_head_tied:
        head = 0  # the embedding is the head
    draft = parallel.draft_bytes if is_last else 0
    return Stage(
        index=index,
        first_layer=first,
        num_layers=count,
        has_embedding=is_first,
        has_head=is_last,
        draft_embedding=origin,
        target_bytes=layers + head + (parallel.embedding_bytes if is_first else 0),
        draft_bytes=draft + (parallel.embedding_bytes if origin == "checkpoint" else 0),
    )


def _given(stage_layers: Sequence[int], num_stages: int, num_layers: int) -> tuple[int, ...]:
    is_sound = len(stage_layers) == num_stages and min(stage_layers, default=0) > 0
    if is_sound and sum(stage_layers) == num_layers:
        return tuple(stage_layers)
    raise DiagnosticError(
        diagnose(
            "SD851",
            where="--stage-layers",
            message=f"{len(stage_layers)} counts that add up to {sum(stage_layers)} were given for "
            f"{num_stages} stages and {num_layers} layers",
            expected=f"{num_stages} counts of 1 or more that add up to {num_layers}",
            found=",".join(map(str, stage_layers)) or "none",
        )
    )


def _balanced(manifest: Manifest, num_stages: int) -> tuple[int, ...]:
    """Return layer counts whose heaviest stage is as light as contiguous stages allow."""
    num_layers = len(manifest.parallel.layer_bytes)
    weight = {
        (index, first, count): _stage(manifest, index, num_stages, first, count).num_bytes
        for index in range(num_stages)
        for first in range(num_layers)
        for count in range(1, num_layers - first + 1)
    }
    # best[first]: (heaviest stage, counts) of the stages from `index` on over layers from `first`.
    best: dict[int, tuple[int, tuple[int, ...]]] = {num_layers: (0, ())}
    for index in reversed(range(num_stages)):
        is_last = index == num_stages - 1
        options: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first in range(index, num_layers):
            counts = [num_layers - first] if is_last else range(1, num_layers - first)
            found = [
                (max(weight[index, first, count], rest), (count, *others))
                for count in counts
                if (known := best.get(first + count)) is not None
                for rest, others in [known]
            ]
            if found:
                options[first] = min(found)
        best = options
    return best[0][1]
