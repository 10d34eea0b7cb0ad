"""Captured layers of a flat config, whichever of the lists a writer used.

Foreign conventions undone: `target_layer_ids` and `dspark_target_layer_ids` count outputs, which is
canonical; lists that a translator left from a Speculators config count boundaries; DeepSeek-V4.1
counts the layers that read the state, which are boundaries too. z-lab's class fills an absent list
from the layer counts (SD324).
*Source:* z-lab/dflash `extract_context_feature` (hidden_states[id + 1]); vLLM pull request 40727.
"""

from __future__ import annotations

from specctl.draft import AuxNumbering
from specctl.formats.aux_layers import AUX_KEY, NO_AUX, AuxFacts, to_canonical
from specctl.formats.block.places import Sections, settle

OUTPUT_LISTS = (
    "dspark_target_layer_ids",
    "dflash_config.target_layer_ids",
    "dspark_config.target_layer_ids",
    "target_layer_ids",
)
BOUNDARY_LISTS = (
    AUX_KEY,
    "aux_hidden_state_layer_ids",
    "dflash_config.layer_ids",
)
INPUT_TYPES = ("deepseek_v41",)
PATH = "draft.aux_layer_ids"


def read_flat_aux(
    sections: Sections, *, num_target_layers: int | None, default_states: int | None
) -> AuxFacts:
    """Return the captured layers; SD206 or SD324 when none are listed, SD304, SD208.

    Args:
        sections: of the config.
        num_target_layers: as the config states it.
        default_states: states of z-lab's default list (the draft's layers); None for a dialect
            that requires the list.
    """
    root = sections.root
    is_input = root.raw("model_type") in INPUT_TYPES
    outputs = sections.places(*OUTPUT_LISTS, meaning=_outputs_of_inputs if is_input else list_of)
    boundaries = sections.places(*BOUNDARY_LISTS, meaning=_outputs_of_inputs)
    place = settle((*outputs, *boundaries))
    if place is None:
        return _default(sections, num_target_layers, default_states)
    ids = place.fields.integers(place.key, PATH)
    if ids is None:
        return NO_AUX
    numbering: AuxNumbering = "output" if place.meaning is list_of else "boundary"
    rule = f"`{place.key}` counts " + ("outputs" if numbering == "output" else "boundaries")
    root.findings.derived("draft.aux_numbering", place.where, rule)
    canonical = to_canonical(ids, numbering)
    if num_target_layers is not None and max(canonical) >= num_target_layers:
        root.findings.add(
            "SD304",
            where=place.where,
            message=f"captured-layer id {max(ids)} lies past the {num_target_layers} layers of "
            "`num_target_layers`",
            expected=f"at most {num_target_layers - (numbering == 'output')} ({numbering} ids)",
            found=max(ids),
        )
    return AuxFacts(num_states=len(ids), declared=ids, numbering=numbering, canonical=canonical)


def list_of(value: object) -> object:
    """Return a list of outputs as it is."""
    return value


def _outputs_of_inputs(value: object) -> object:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return [item - 1 for item in value]
    return value


def default_outputs(num_target_layers: int, num_states: int) -> tuple[int, ...]:
    """Return z-lab's list: the middle for one state, else evenly from 1 to n - 3."""
    if num_states == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + place * span / (num_states - 1)) for place in range(num_states))


def _default(
    sections: Sections, num_target_layers: int | None, default_states: int | None
) -> AuxFacts:
    root = sections.root
    nested = sections.nested.get("dflash_config", root)
    where = nested.where("target_layer_ids")
    if not default_states or num_target_layers is None:
        root.findings.add(
            "SD206",
            where=where,
            message="`target_layer_ids` is absent and the format has no rule for it",
            expected="`target_layer_ids`: the layers whose outputs are captured",
            found="nothing",
        )
        return NO_AUX
    ids = default_outputs(num_target_layers, default_states)
    rule = f"evenly from 1 to n - 3, n = {num_target_layers}, one for each draft layer"
    root.findings.add(
        "SD324",
        where=where,
        message=f"`target_layer_ids` is absent; {list(ids)} follow from the layer counts",
        expected="`target_layer_ids`",
        found="nothing",
    )
    root.findings.derived(PATH, where, rule)
    root.findings.derived("draft.aux_numbering", where, rule)
    return AuxFacts(num_states=len(ids), declared=None, numbering="output", canonical=ids)
