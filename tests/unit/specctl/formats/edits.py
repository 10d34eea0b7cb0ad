"""Open a fixture checkpoint with edits to its config and tensor table, without writing files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from specctl import checks, formats
from specctl.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from specctl.contract.diagnostics import Diagnostic
from specctl.draft import DraftCheckpoint, TargetCheckpoint

CHECKPOINTS = Path(__file__).resolve().parents[4] / "fixtures" / "checkpoints"
DELETE = object()
BLOCK_FACTS = (
    "algorithm",
    "decoder",
    "target_hidden_size",
    "aux_layer_ids",
    "mask_token_id",
    "markov",
    "has_confidence_head",
    "is_confidence_with_markov",
    "sample_from_anchor",
    "draft_block_size",
    "geometry",
    "draft_vocab_size",
    "target_vocab_size",
    "draft_to_target",
    "details",
)
"""What a block draft is, whatever the dialect that it is written in."""


def opened(
    name: str,
    config: Mapping[str, object] | None = None,
    *,
    drop: tuple[str, ...] = (),
    add: Mapping[str, tuple[int, ...]] | None = None,
) -> Checkpoint:
    """Return a fixture with dotted config paths set and tensors dropped or added by shape."""
    checkpoint = open_checkpoint(CHECKPOINTS / name)
    changed = copy.deepcopy(checkpoint.config)
    for path, value in (config or {}).items():
        *parents, last = path.split(".")
        holder = changed
        for part in parents:
            holder = holder[part]  # type: ignore[index]
        if value is DELETE:
            del holder[last]  # type: ignore[union-attr]
        else:
            holder[last] = value  # type: ignore[index]
    tensors = {key: entry for key, entry in checkpoint.tensors.items() if key not in drop}
    for key, shape in (add or {}).items():
        tensors[key] = TensorEntry(
            key=key, file="model.safetensors", dtype="BF16", shape=shape, begin=0, end=0
        )
    return replace(checkpoint, config=changed, tensors=tensors)


def draft(
    name: str, config: Mapping[str, object] | None = None, **edits: object
) -> DraftCheckpoint:
    """Return the draft of an edited fixture."""
    return formats.read_draft(opened(name, config, **edits))  # type: ignore[arg-type]


def target(
    name: str, config: Mapping[str, object] | None = None, **edits: object
) -> TargetCheckpoint:
    """Return the target of an edited fixture."""
    return formats.read_target(opened(name, config, **edits))  # type: ignore[arg-type]


def codes(diagnostics: tuple[Diagnostic, ...]) -> list[str]:
    """Return the codes, each once."""
    return sorted({d.code for d in diagnostics})


def all_codes(read: DraftCheckpoint) -> list[str]:
    """Return the codes of reader and checks."""
    return codes((*read.diagnostics, *checks.check_draft(read)))
