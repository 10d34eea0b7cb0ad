"""Checks that a draft and a target belong together."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.checkpoint import tensor_place
from specctl.checkpoint.config_sections import named_architectures
from specctl.checks.places import fact_place
from specctl.checks.vocabulary import map_tensor, missing_end_ids
from specctl.contract.diagnostics import Diagnostic, Severity, diagnose
from specctl.contract.manifest import Rope
from specctl.contract.padding_rows import is_padding_apart, num_token_rows
from specctl.draft import FIRST_EMBEDDINGS, FIRST_HEADS, DraftCheckpoint, TargetCheckpoint

_HEAD_ELSEWHERE = ("mtp", "eagle", *FIRST_HEADS)  # the target's by design, or numbered heads
_LARGEST_EPSILON = 1e-3
_NAMED_TARGET = "config.json#/speculators_config/verifier/architectures"


def check_fit(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield what only both sources together show.

    SD304, SD305, SD312, SD314, SD315, SD317, SD329, SD330, SD332, SD402, SD406, SD411, SD412,
    SD416, SD501, SD509 and SD510.
    """
    yield from _check_architecture(draft, target)
    yield from _check_hidden(draft, target)
    yield from _check_depth(draft, target)
    yield from _check_vocabulary(draft, target)
    yield from _check_embedding(draft, target)
    yield from _check_head(draft, target)
    yield from _check_positions(draft, target)
    yield from _check_rope(draft, target)
    yield from _check_epsilon(draft, target)
    yield from _check_rows(draft, target)
    own = set(draft.eos_token_ids)
    others = (token for token in target.eos_token_ids if token not in own)
    yield from missing_end_ids(draft, others, source="the target")


def _check_architecture(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD330 when a Speculators config names another architecture than the target's."""
    named = named_architectures(draft.config)
    if not named or not target.architecture:
        return
    if target.architecture not in named:
        shown = ", ".join(f"`{name}`" for name in named[:3])
        yield diagnose(
            "SD330",
            where=_NAMED_TARGET,
            message=f"the draft was made for {shown}; this target is `{target.architecture}`",
            expected=target.architecture,
            found=named[0] if len(named) == 1 else named[:3],
        )


def _check_hidden(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    if None in (draft.target_hidden_size, target.hidden_size):
        return
    if draft.target_hidden_size != target.hidden_size:
        fuse = draft.tensors.get("fc.weight")
        has_columns = fuse is not None and bool(fuse.shape)
        note = (f"`{fuse.key}` reads {fuse.shape[-1]} columns",) if fuse and has_columns else ()
        yield diagnose(
            "SD305",
            where=fact_place(draft.origins, "draft.target_hidden_size"),
            message=f"the draft reads target states of width {draft.target_hidden_size}; this "
            f"target's have {target.hidden_size}",
            expected=target.hidden_size,
            found=draft.target_hidden_size,
            notes=note,
        )


def _check_depth(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    layers = target.num_layers
    if layers is None:
        return
    fuse = draft.tensors.get("fc.weight")
    if draft.target_num_layers not in (None, layers):
        yield diagnose(
            "SD317",
            where="tensor names" if fuse is None else tensor_place(fuse),
            message=f"the draft is made for a target of {draft.target_num_layers} layers; this one "
            f"has {layers}",
            expected=layers,
            found=draft.target_num_layers,
        )
    ids = draft.aux_layer_ids
    where = fact_place(draft.origins, "draft.aux_layer_ids")
    if not ids:
        yield from _check_undecided(draft.declared_aux_ids or (), layers, where)
        return
    if max(ids) >= layers:
        is_boundary = draft.aux_numbering == "boundary"
        yield diagnose(
            "SD304",
            where=where,
            message=f"captured-layer id {max(ids) + is_boundary} lies past the target's {layers} "
            "layers",
            expected=f"at most {layers if is_boundary else layers - 1} ({draft.aux_numbering} ids)",
            found=max(ids) + is_boundary,
        )
    elif max(ids) == layers - 1:
        yield diagnose(
            "SD312",
            where=where,
            message=f"the state after the last of {layers} layers is captured, before the final "
            "norm",
        )


def _check_undecided(ids: tuple[int, ...], layers: int, where: str) -> Iterator[Diagnostic]:
    """Yield SD304 for ids that lie past the target however they are counted."""
    if ids and max(ids) > layers:
        yield diagnose(
            "SD304",
            where=where,
            message=f"captured-layer id {max(ids)} lies past the target's {layers} layers",
            expected=f"at most {layers} (boundary ids) or {layers - 1} (output ids)",
            found=max(ids),
        )


def _check_vocabulary(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    ours, theirs = draft.target_vocab_size, target.vocab_size
    if ours is None or theirs is None or ours == theirs:
        return
    where = fact_place(draft.origins, "vocabulary.target_vocab_size")
    entries = target.tokenizer_size
    if is_padding_apart(ours, theirs, entries):
        yield diagnose(
            "SD412",
            where=where,
            message=f"the draft counts {ours} target ids and the target has {theirs} rows; the "
            f"tokenizer's {entries} entries fit both",
            expected=theirs,
            found=ours,
        )
        return
    yield diagnose(
        "SD411",
        where=where,
        message=f"the draft was made for {ours} target ids; this target has {theirs}",
        expected=theirs,
        found=ours,
        notes=() if entries is None else (f"the target's tokenizer has {entries} entries",),
    )


def _check_embedding(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    if draft.has_own_embedding or None in (draft.hidden_size, target.hidden_size):
        return
    if not draft.reads_tokens or draft.algorithm in FIRST_EMBEDDINGS:
        return
    if draft.hidden_size != target.hidden_size:
        yield diagnose(
            "SD509",
            where=fact_place(draft.origins, "draft.decoder.hidden_size"),
            message=f"the draft is {draft.hidden_size} wide and has no embedding; the target's has "
            f"width {target.hidden_size}",
            expected="`embed_tokens.weight` in the draft",
            found="nothing",
        )


def _check_head(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    if draft.has_own_head or draft.is_head_tied or draft.algorithm in _HEAD_ELSEWHERE:
        return
    if not draft.tensors:
        return  # no weight file was read, which is the finding
    if None not in (draft.hidden_size, target.hidden_size) and (
        draft.hidden_size != target.hidden_size
    ):
        yield diagnose(
            "SD501",
            where=fact_place(draft.origins, "draft.tensors"),
            message=f"the draft stores no output head, and the target's has width "
            f"{target.hidden_size} instead of {draft.hidden_size}",
            expected="`lm_head.weight` in the draft",
            found="nothing",
        )
        return
    is_reduced = draft.map_kind == "reduced"
    rows = f"{draft.draft_vocab_size} of its rows" if is_reduced else "all its rows"
    yield diagnose(
        "SD510",
        where=fact_place(draft.origins, "draft.tensors"),
        message=f"the draft stores no output head; the target's is used, {rows}",
        severity="warning" if is_reduced else "info",
    )


def _check_positions(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    if draft.decoder is None or target.decoder is None:
        return
    ours = draft.decoder.max_position_embeddings
    theirs = target.decoder.max_position_embeddings
    if ours < theirs:
        yield diagnose(
            "SD315",
            where=fact_place(draft.origins, "draft.decoder.max_position_embeddings"),
            message=f"the draft ends at position {ours}, the target at {theirs}",
            expected=theirs,
            found=ours,
        )


def _check_rope(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD329: theta or scaling differ; widths of heads may, since each model has its own."""
    if draft.decoder is None or target.decoder is None or draft.algorithm == "pard":
        return  # a model of its own has its own positions
    ours, theirs = draft.decoder.rope, target.decoder.rope
    if ours != theirs:
        fact = "rope.theta" if ours.theta != theirs.theta else "rope"
        # A prediction layer was trained inside its target, with the target's own numbers.
        severity: Severity | None = "warning" if draft.algorithm == "mtp" else None
        yield diagnose(
            "SD329",
            where=fact_place(draft.origins, f"draft.decoder.{fact}"),
            message=f"the draft's rotary numbers are {_rope_text(ours)}, the target's "
            f"{_rope_text(theirs)}",
            expected=_rope_text(theirs),
            found=_rope_text(ours),
            severity=severity,
        )


def _check_epsilon(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD332 for another epsilon than the target's norms have."""
    if draft.decoder is None or target.decoder is None or draft.algorithm == "pard":
        return
    ours, theirs = draft.decoder.rms_norm_eps, target.decoder.rms_norm_eps
    if ours != theirs:
        is_odd = draft.algorithm == "mtp" or (ours >= _LARGEST_EPSILON > theirs)
        yield diagnose(
            "SD332",
            where=fact_place(draft.origins, "draft.decoder.rms_norm_eps"),
            message=f"`rms_norm_eps` of the draft is {ours:g}, of the target {theirs:g}",
            expected=f"{theirs:g}",
            found=f"{ours:g}",
            severity="warning" if is_odd else None,
        )


def _rope_text(rope: Rope) -> str:
    numbers = ", ".join(f"{key} {value}" for key, value in sorted(rope.parameters.items()))
    scaling = "" if rope.kind == "default" else f", {rope.kind}"
    return f"theta {rope.theta:g}{scaling}" + (f" ({numbers})" if numbers else "")


def _check_rows(draft: DraftCheckpoint, target: TargetCheckpoint) -> Iterator[Diagnostic]:
    """Yield what is wrong with ids of the map, and SD314 for a mask id without a row."""
    rows = target.vocab_size
    if rows is not None and draft.map_kind == "reduced":
        yield from _check_map_rows(draft, rows, target.tokenizer_size)
    token = draft.mask_token_id
    known = draft.target_vocab_size
    has_row = token is None or rows is None or token < rows or draft.has_own_embedding
    if not has_row and "mask_file" not in draft.details and known is not None:
        yield diagnose(
            "SD314",
            where=fact_place(draft.origins, "draft.mask_token_id"),
            message=f"the mask token is id {token} and the target's embedding has {rows} rows",
            expected=f"below {rows}",
            found=token,
        )


def _check_map_rows(draft: DraftCheckpoint, rows: int, entries: int | None) -> Iterator[Diagnostic]:
    """Yield SD402 for ids of a map without a row in the target, and SD416 for padding rows.

    What is outside the draft's own count of target ids is said without a target.
    """
    ref, ids = map_tensor(draft), draft.draft_to_target
    if ref is None or ids is None:
        return
    known = draft.target_vocab_size or rows
    outside = [place for place, token in enumerate(ids) if rows <= token < known]
    if outside:
        yield diagnose(
            "SD402",
            where=tensor_place(ref),
            message=f"{len(outside)} entries of the map are no rows of the target: draft id "
            f"{outside[0]} is target id {ids[outside[0]]}",
            expected=f"0 to {rows - 1}",
            found=ids[outside[0]],
        )
    first_padding = num_token_rows(rows, entries)
    beyond = [place for place, token in enumerate(ids) if first_padding <= token < rows]
    if beyond:
        yield diagnose(
            "SD416",
            where=tensor_place(ref),
            message=f"{len(beyond)} entries of the map are padding rows: draft id {beyond[0]} "
            f"is target id {ids[beyond[0]]} of a tokenizer of {entries}",
            expected=f"ids below {entries}",
            found=ids[beyond[0]],
        )
