"""SafeAILab EAGLE-3: flat config, `midlayer.` names (or `layers.0.`), no token count.

Foreign conventions undone: without a field the captured layers are boundaries [2, n//2, n-3];
SpecForge and ModelOpt add `eagle_config.eagle_aux_hidden_state_layer_ids`, which counts outputs in
their files and boundaries in others (SD303). The layer count of the config may be the target's.
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import (
    NO_AUX,
    AuxFacts,
    decide_numbering,
    open_default,
    to_canonical,
)
from specctl.formats.eagle.eagle3 import SAFEAILAB_NAMES, Dialect, read_eagle3, read_norm_flags
from specctl.formats.fields import CONFIG, Fields, Findings, root_fields
from specctl.formats.model_types import flat_layers
from specctl.formats.speculators import report_gamma_missing

DIALECT = Dialect(format="safeailab-eagle3", names=SAFEAILAB_NAMES)
AUX_KEY = "eagle_aux_hidden_state_layer_ids"


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, Findings())
    layers, family = flat_layers(root, absent_model_type="llama")
    report_gamma_missing(root, CONFIG)
    flags = read_norm_flags(root, has_norm_before_residual=_norm_before_residual(root))
    if flags.has_norm_output:
        root.findings.add(
            "SD316",
            where=root.where("norm_output"),
            message="`norm_output` is true; older SpecForge meant the raw state by it",
            expected="the trainer's version",
            found="true, read as: the normed state is fed back",
        )
    return read_eagle3(
        checkpoint,
        DIALECT,
        root=root,
        layers=layers,
        family=family,
        aux=_aux(root),
        num_speculative_tokens=None,
        flags=flags,
    )


def _norm_before_residual(root: Fields) -> bool:
    key, path = "norm_before_residual", "draft.has_norm_before_residual"
    value = root.flag(key, path)
    if value is None:
        root.findings.derived(
            path, root.where(key), "SafeAILab adds the state before its norm to the residual"
        )
    return bool(value)


def _aux(root: Fields) -> AuxFacts:
    nested = root.section("eagle_config")
    holders = [fields for fields in (nested, root) if fields is not None and fields.has(AUX_KEY)]
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
