"""Close the open facts of a draft: with a target, and with what the user gives.

Precedence is user > file > rule of the format; a fact given by the user has origin `given` and the
diagnostics that it settles are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import PARALLEL_DRAFTS, Origin
from specctl.draft import (
    AuxNumbering,
    DraftCheckpoint,
    TargetCheckpoint,
    block_geometry,
    chain_geometry,
    parallel_geometry,
)
from specctl.formats.aux_layers import (
    DEFAULT_RULE,
    decide_numbering,
    default_boundaries,
    to_canonical,
)
from specctl.formats.usual_layers import shifted_list

GAMMA_OPTION = "--num-speculative-tokens"
AUX_OPTION = "--aux-layer-ids"
NUMBERING_OPTION = "--aux-numbering"


def complete_draft(draft: DraftCheckpoint, target: TargetCheckpoint) -> DraftCheckpoint:
    """Return the draft with the captured layers that only the target's layer count decides.

    A list that this count shows to be one layer off is SD331.
    """
    layers = target.num_layers
    if layers is not None and not any(d.code == "SD331" for d in draft.diagnostics):
        shifted = shifted_list(draft, layers)
        if shifted is not None:
            draft = replace(draft, diagnostics=(*draft.diagnostics, shifted))
    has_default = draft.algorithm in ("eagle3", "peagle")
    if not has_default or draft.aux_layer_ids is not None or layers is None:
        return draft
    where = f"target {CONFIG}#/num_hidden_layers"
    if draft.declared_aux_ids is not None:
        numbering, rule, is_guess = decide_numbering(draft.declared_aux_ids, layers)
        if numbering is None or is_guess:
            return draft
        return _with_aux(
            draft,
            to_canonical(draft.declared_aux_ids, numbering),
            numbering,
            Origin(kind="derived", where=where, rule=rule),
        )
    if draft.aux_numbering is None:
        return draft
    return _with_aux(
        draft,
        to_canonical(default_boundaries(layers), "boundary"),
        "boundary",
        Origin(kind="derived", where=where, rule=f"{DEFAULT_RULE}, n = {layers}"),
    )


def with_given(
    draft: DraftCheckpoint,
    *,
    num_speculative_tokens: int | None = None,
    aux_layer_ids: tuple[int, ...] | None = None,
    aux_numbering: AuxNumbering | None = None,
    draft_to_target: tuple[int, ...] | None = None,
) -> DraftCheckpoint:
    """Return the draft with facts given by the user; None leaves a fact as it is.

    Args:
        draft: as read.
        num_speculative_tokens: tokens to draft in a round; a block draft offers at most as many as
            its block (more is SD302).
        aux_layer_ids: captured layers in `aux_numbering`, canonical (output) without one.
        aux_numbering: alone, it says how the file's own list is to be read.
        draft_to_target: absolute target ids in draft-id order, for a reduced head whose file has no
            map (settles SD401); a map in the file wins and this one is left out.
    """
    if draft_to_target is not None and draft.d2t is None:
        draft = replace(draft, draft_to_target=draft_to_target)
    if aux_layer_ids is not None or aux_numbering is not None:
        draft = _given_aux(draft, aux_layer_ids, aux_numbering)
    if num_speculative_tokens is not None:
        draft = _given_gamma(draft, num_speculative_tokens)
    return draft


def _given_aux(
    draft: DraftCheckpoint, ids: tuple[int, ...] | None, numbering: AuxNumbering | None
) -> DraftCheckpoint:
    listed = draft.declared_aux_ids if ids is None else ids
    if listed is None:
        return draft
    spoken = numbering or "output"
    where = NUMBERING_OPTION if ids is None else AUX_OPTION
    origin = Origin(kind="given", where=where)
    return _with_aux(draft, to_canonical(listed, spoken), spoken, origin)


def _with_aux(
    draft: DraftCheckpoint, canonical: tuple[int, ...], numbering: AuxNumbering, origin: Origin
) -> DraftCheckpoint:
    added = {"draft.aux_layer_ids": origin, "draft.aux_numbering": origin}
    return replace(
        draft,
        aux_layer_ids=canonical,
        aux_numbering=numbering,
        num_aux_states=len(canonical),
        origins=_merged(draft.origins, added),
        diagnostics=_without(draft.diagnostics, "SD303", "SD306", "SD331"),
    )


def _given_gamma(draft: DraftCheckpoint, gamma: int) -> DraftCheckpoint:
    origins = _merged(
        draft.origins,
        {"geometry.num_speculative_tokens": Origin(kind="given", where=GAMMA_OPTION)},
    )
    kept = _without(draft.diagnostics, "SD301")
    if not draft.is_block:
        widths = parallel_geometry if draft.algorithm in PARALLEL_DRAFTS else chain_geometry
        return replace(draft, geometry=widths(gamma), origins=origins, diagnostics=kept)
    size, anchor = draft.draft_block_size, draft.sample_from_anchor
    if size is None or anchor is None:
        return replace(draft, origins=origins, diagnostics=kept)
    available = size if anchor else size - 1
    if gamma > available:
        finding = diagnose(
            "SD302",
            where=GAMMA_OPTION,
            message=f"{gamma} tokens were asked of a block that offers {available}",
            expected=f"at most {available}",
            found=gamma,
            help=f"Pass `{GAMMA_OPTION} {available}` or fewer",
        )
        return replace(draft, diagnostics=(*kept, finding))
    geometry = block_geometry(
        draft_block_size=size, sample_from_anchor=anchor, num_speculative_tokens=gamma
    )
    return replace(draft, geometry=geometry, origins=origins, diagnostics=kept)


def _merged(origins: Mapping[str, Origin], added: dict[str, Origin]) -> Mapping[str, Origin]:
    return MappingProxyType({**origins, **added})


def _without(diagnostics: tuple[Diagnostic, ...], *codes: str) -> tuple[Diagnostic, ...]:
    return tuple(d for d in diagnostics if d.code not in codes)
