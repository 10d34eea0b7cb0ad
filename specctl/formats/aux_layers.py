"""Captured-layer ids: two numberings in files, one in code.

A *boundary* id k means the state after k blocks (0 = embedding output, n = before the final
norm); an *output* id i means the output of 0-based layer i. Canonical is output: boundary k is
output k - 1.
*Source:* Speculators and vLLM use boundaries; SpecForge and ModelOpt write outputs; SafeAILab has
no field and captures boundaries [2, n//2, n-3]. SGLang pull request 25454 tells by the first id.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.draft import AuxNumbering
from specctl.formats.fields import Fields

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
"""The list of captured layers in most EAGLE files; what its ids count differs by writer."""

OTHER_KEY = "target_layer_ids"
OTHER_KEYS = (OTHER_KEY, AUX_KEY, "aux_hidden_state_layer_ids")
OTHER_SECTIONS = ("dflash_config", "dspark_config", "eagle_config")
DEFAULT_NUM_STATES = 3
DEFAULT_RULE = "format default: boundaries [2, n//2, n-3] of n target layers"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxFacts:
    """Captured layers of a draft; fields as in `DraftCheckpoint`."""

    num_states: int | None
    declared: tuple[int, ...] | None
    numbering: AuxNumbering | None
    canonical: tuple[int, ...] | None


NO_AUX = AuxFacts(num_states=None, declared=None, numbering=None, canonical=None)


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return the boundary ids that EAGLE-3 captures when a file names none."""
    return (2, num_layers // 2, num_layers - 3)


def to_canonical(ids: tuple[int, ...], numbering: AuxNumbering) -> tuple[int, ...]:
    """Return 0-based output-of-layer ids; -1 is the embedding output."""
    return tuple(k - 1 for k in ids) if numbering == "boundary" else ids


def read_boundary_ids(fields: Fields, key: str, *, has_default: bool) -> AuxFacts:
    """Read a Speculators list, which counts boundaries.

    Args:
        fields: config object.
        key: name of the list.
        has_default: an absent list means the format default (then SD306), else it is SD206.
    """
    ids = fields.integers(key, "draft.aux_layer_ids")
    if ids is None:
        if fields.has(key):
            return NO_AUX
        if has_default:
            return open_default(fields, key)
        fields.findings.add(
            "SD206",
            where=fields.where(key),
            message=f"`{key}` is absent and the format has no rule for it",
            expected=f"`{key}`: boundary ids of the captured layers",
            found="nothing",
        )
        return NO_AUX
    _report_other_list(fields, key, ids)
    rule = "Speculators lists count boundaries: output id = boundary id - 1"
    fields.findings.derived("draft.aux_layer_ids", fields.where(key), rule)
    fields.findings.derived("draft.aux_numbering", fields.where(key), rule)
    return AuxFacts(
        num_states=len(ids),
        declared=ids,
        numbering="boundary",
        canonical=to_canonical(ids, "boundary"),
    )


def read_output_ids(fields: Fields, key: str) -> AuxFacts:
    """Read a required list that counts outputs of layers, as z-lab and DeepSpec write it (SD206).

    Args:
        fields: config object.
        key: name of the list.
    """
    ids = fields.integers(key, "draft.aux_layer_ids")
    if ids is None:
        if not fields.has(key):
            fields.findings.add(
                "SD206",
                where=fields.where(key),
                message=f"`{key}` is absent and the format has no rule for it",
                expected=f"`{key}`: output ids of the captured layers",
                found="nothing",
            )
        return NO_AUX
    rule = "the format's list counts outputs of layers; -1 is the embedding"
    fields.findings.derived("draft.aux_numbering", fields.where(key), rule)
    return AuxFacts(num_states=len(ids), declared=ids, numbering="output", canonical=ids)


def _report_other_list(fields: Fields, key: str, ids: tuple[int, ...]) -> None:
    """Report SD208 for every other list of captured layers that means others than `ids`.

    Converters leave lists of other dialects, outputs or boundaries, beside the format's own one;
    those of `OTHER_SECTIONS` are looked at and not read, so that they stay unknown fields (SD211).
    """
    known = (list(ids), list(to_canonical(ids, "boundary")))
    others = [(OTHER_KEY, fields.raw(OTHER_KEY))]
    for name in OTHER_SECTIONS:
        section = fields.data.get(name)
        if isinstance(section, dict):
            others += [(f"{name}/{inner}", section.get(inner)) for inner in OTHER_KEYS]
    for place, other in others:
        if other is not None and other not in known:
            fields.findings.add(
                "SD208",
                where=fields.where(place),
                message=f"`{place.replace('/', '.')}` names other captured layers than `{key}`",
                expected=f"{known[0]} (boundaries) or {known[1]} (outputs)",
                found=other,
            )


def open_default(fields: Fields, key: str) -> AuxFacts:
    """Return the format default, whose ids wait for the target's layer count (SD306)."""
    fields.findings.add(
        "SD306",
        where=fields.where(key),
        message="the captured layers are [2, n//2, n-3] of the target's n layers, which is not "
        "known here",
        expected="a target, or the ids",
        found="neither",
    )
    fields.findings.derived("draft.aux_numbering", fields.where(key), DEFAULT_RULE)
    return AuxFacts(
        num_states=DEFAULT_NUM_STATES, declared=None, numbering="boundary", canonical=None
    )


def decide_numbering(
    ids: tuple[int, ...], num_layers: int | None
) -> tuple[AuxNumbering | None, str, bool]:
    """Decide what a list without a stated numbering counts.

    Args:
        ids: the list.
        num_layers: layers of the target, when known.

    Returns:
        The numbering (None: undecidable), the rule that decided, and whether it is a guess.
    """
    if num_layers is not None and max(ids) == num_layers:
        return (
            "boundary",
            f"id {num_layers} exists only as a boundary of {num_layers} layers",
            False,
        )
    if ids[0] == 1:
        return "output", "SpecForge and ModelOpt write outputs; their first id is 1", False
    if ids[0] == 2:
        return "boundary", "a first id of 2 is the first default boundary (a guess)", True
    return None, "the ids alone do not tell", True
