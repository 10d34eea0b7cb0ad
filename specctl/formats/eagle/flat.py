"""EAGLE-3 with a flat config: SafeAILab, SpecForge, ModelOpt and NeMo Automodel.

They share the config of a Llama model and differ in names: SafeAILab and SpecForge write
`midlayer.`, ModelOpt writes `layers.0.`, NeMo puts everything in a module `model.`. None states a
token count.

Foreign conventions undone: without a field the captured layers are boundaries [2, n//2, n-3];
`eagle_config.eagle_aux_hidden_state_layer_ids` counts outputs in SpecForge's and ModelOpt's files
and boundaries in others (SD303). The layer count of the config may be the target's.
*Source:* SafeAILab/EAGLE `cnets.py`; SpecForge `llama3_eagle.py`; Model-Optimizer's EAGLE-3 export
template; NeMo Automodel `LlamaEagle3DraftModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint import Checkpoint, TensorEntry
from specctl.contract.file_names import CONFIG
from specctl.contract.roles import EAGLE3_ROLES
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import (
    AUX_KEY,
    NO_AUX,
    AuxFacts,
    decide_numbering,
    open_default,
    to_canonical,
)
from specctl.formats.eagle.eagle3 import (
    NEMO_NAMES,
    SAFEAILAB_NAMES,
    SPECULATORS_NAMES,
    Dialect,
    read_eagle3,
    read_norm_flags,
    report_unflagged,
)
from specctl.formats.eagle.parallel_heads import heads_names, heads_roles
from specctl.formats.eagle.roles import Parts
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import flat_layers
from specctl.formats.names import NameTable
from specctl.formats.speculators import report_gamma_missing

SAFEAILAB = Dialect(format="safeailab-eagle3", names=SAFEAILAB_NAMES)
SPECFORGE = Dialect(format="specforge-eagle3", names=SAFEAILAB_NAMES)
MODELOPT = Dialect(format="modelopt-eagle3", names=SPECULATORS_NAMES, is_ranked=True)
NEMO = Dialect(format="nemo-eagle3", names=NEMO_NAMES)

# Switches of ModelOpt's template. Those here either have no effect on one layer or say what the
# tensors show.
_TEMPLATE_NOTES = (
    "eagle_architecture",
    "eagle_decoder_type",
    "has_lm_head",
    "next_layer_regular",
    "parallel_draft_step",
    "parallel_draft_heads_num_layers",
    "use_mtp_layernorm",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Switch:
    """A part that `eagle_config` can leave out, and the role that shows it."""

    key: str
    role: str


_AUX = _Switch(key="use_aux_hidden_state", role="fc.weight")
_FIRST = _Switch(key="use_input_layernorm_in_first_layer", role="layers.0.input_norm")
_LAST = _Switch(key="use_last_layernorm", role="norm")


def read_safeailab(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    return _read(checkpoint, SAFEAILAB)


def read_specforge(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; SD316 when `norm_output` is true (its meaning changed)."""
    return _read(checkpoint, SPECFORGE)


def read_modelopt(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; parts that its switches leave out are not required."""
    return _read(checkpoint, MODELOPT)


def read_nemo(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft."""
    return _read(checkpoint, NEMO)


def _read(checkpoint: Checkpoint, dialect: Dialect) -> DraftCheckpoint:
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = flat_layers(root, absent_model_type="llama")
    report_gamma_missing(root, CONFIG)
    nested = root.section("eagle_config")
    flags = read_norm_flags(
        root, has_norm_before_residual=flat_norm_before_residual(root, nested), nested=nested
    )
    if flags.has_norm_output and dialect is not SAFEAILAB:
        report_norm_output(root)
    names = heads_names(dialect.names, checkpoint.tensors)
    parts = _parts(checkpoint.tensors, names, root, nested)
    return read_eagle3(
        checkpoint,
        Dialect(
            format=dialect.format,
            names=names,
            is_ranked=dialect.is_ranked,
            roles=(*parts.roles(EAGLE3_ROLES), *heads_roles(checkpoint.tensors)),
        ),
        root=root,
        layers=layers,
        family=family,
        aux=read_aux(root, nested) if parts.has_aux_states else NO_AUX,
        num_speculative_tokens=None,
        flags=flags,
        details={"eagle_config": dict(nested.data)} if nested is not None else {},
    )


def report_norm_output(root: Fields) -> None:
    """Report SD316: only the trainer's date tells what a true `norm_output` means."""
    root.findings.add(
        "SD316",
        where=root.where("norm_output"),
        message="`norm_output` is true; older SpecForge meant the raw state by it",
        expected="the trainer's version",
        found="true, read as: the normed state is fed back",
    )


def flat_norm_before_residual(root: Fields, nested: Fields | None) -> bool:
    """Return whether the residual is the normed state; false when absent, as SafeAILab computes."""
    key, path = "norm_before_residual", "draft.has_norm_before_residual"
    holder = nested if nested is not None and nested.has(key) else root
    value = holder.flag(key, path)
    if value is None:
        root.findings.derived(
            path, root.where(key), "SafeAILab and ModelOpt add the state before its norm"
        )
    return bool(value)


def note_switches(root: Fields, nested: Fields | None) -> None:
    """Take note of the template's switches in a dialect that always holds every part."""
    for fields in (root, nested):
        for key in (*_TEMPLATE_NOTES, _AUX.key, _FIRST.key, _LAST.key):
            if fields is not None:
                fields.raw(key)


def _parts(
    tensors: Mapping[str, TensorEntry], names: NameTable, root: Fields, nested: Fields | None
) -> Parts:
    """Return the parts that the switches keep; a stored tensor of a part left out is SD506."""
    note_switches(root, nested)
    keys = names.roles_in(tensors)
    kept: dict[str, bool] = {}
    for switch in (_AUX, _FIRST, _LAST):
        holder = nested if nested is not None and nested.has(switch.key) else root
        stated = holder.flag(switch.key)
        stored = keys.get(switch.role)
        kept[switch.key] = stated is not False or stored is not None
        if stated is False and stored is not None:
            report_unflagged(holder, tensors[stored].describe(), stored, switch.key)
    return Parts(
        has_aux_states=kept[_AUX.key],
        has_first_norm=kept[_FIRST.key],
        has_last_norm=kept[_LAST.key],
    )


def read_aux(root: Fields, nested: Fields | None) -> AuxFacts:
    """Return the captured layers of a flat config; SD303 when their numbering is not certain."""
    # ModelOpt's template holds an empty list until layers are chosen.
    holders = [f for f in (nested, root) if f is not None and f.raw(AUX_KEY) not in (None, [])]
    if not holders:
        return open_default(root, AUX_KEY)
    if holders[1:] and holders[0].raw(AUX_KEY) != holders[1].raw(AUX_KEY):
        root.findings.add(
            "SD208",
            where=root.where(AUX_KEY),
            message=f"`{AUX_KEY}` differs from the list in `eagle_config`",
            expected=holders[0].raw(AUX_KEY),
            found=holders[1].raw(AUX_KEY),
        )
    ids = holders[0].integers(AUX_KEY, "draft.aux_layer_ids")
    if ids is None:
        return NO_AUX
    return _decide(ids, holders[0])


def _decide(ids: tuple[int, ...], holder: Fields) -> AuxFacts:
    numbering, rule, is_guess = decide_numbering(ids, None)
    if is_guess:
        holder.findings.add(
            "SD303",
            where=holder.where(AUX_KEY),
            message=f"ids {list(ids)} do not say whether they count outputs or boundaries"
            + ("" if numbering is None else f"; read as boundaries: {rule}"),
            expected="`output` or `boundary`",
            found=numbering or "undecided",
            severity="error" if numbering is None else "warning",
            notes=(
                f"as boundaries: outputs of layers {[k - 1 for k in ids]}",
                f"as outputs: outputs of layers {list(ids)}",
            ),
        )
    if numbering is None:
        holder.findings.origins.pop("draft.aux_layer_ids", None)
        return AuxFacts(num_states=len(ids), declared=ids, numbering=None, canonical=None)
    holder.findings.derived("draft.aux_layer_ids", holder.where(AUX_KEY), rule)
    holder.findings.derived("draft.aux_numbering", holder.where(AUX_KEY), rule)
    return AuxFacts(
        num_states=len(ids),
        declared=ids,
        numbering=numbering,
        canonical=to_canonical(ids, numbering),
    )
