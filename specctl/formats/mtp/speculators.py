"""Speculators mtp: `mtp_layers.0.` names, the target's embedding and head.

The layer is one of `transformer_layer_config`'s model type: a dense one of the llama family, which
the runtime computes, or a gated one with experts (Qwen3-Next, Qwen3.5), which is described only.
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.contract.roles import MTP_ROLES
from specctl.draft import DraftCheckpoint, chain_geometry
from specctl.formats.assemble import assemble, is_whole
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import CLASS_DEFAULTS, defaults_rule, family_of
from specctl.formats.mtp import generic
from specctl.formats.mtp.checks import report_experts, report_required
from specctl.formats.mtp.config import settle_fields, sizes_of
from specctl.formats.mtp.families import SPECULATORS
from specctl.formats.mtp.part import find_part
from specctl.formats.mtp.roles import roles_of
from specctl.formats.mtp.style import read_style
from specctl.formats.speculators import read_token_count
from specctl.formats.vocabulary import identity_vocabulary

_SECTION = "transformer_layer_config"
GATED_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
COUNT_KEY = "num_nextn_predict_layers"


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers = _layer_fields(root)
    tokens = read_token_count(root, "mtp")
    part = find_part(SPECULATORS, checkpoint.tensors) or generic.empty_part(SPECULATORS)
    _refuse_several_layers(root, len(part.indexes))
    names = generic.names_of(part)
    matched = names.match(checkpoint.tensors, root.findings)
    style = read_style(matched.tensors)
    decoder = generic.decoder_of(
        checkpoint, part, style, names=names, matched=matched, layers=layers, absent="qwen2"
    )
    if decoder is None and is_whole(checkpoint):
        report_required(part, style, matched, root.findings, checkpoint=checkpoint)
    sizes = {} if decoder is not None else sizes_of(part, layers)
    report_experts(part, style, matched, root.findings, sizes)
    settle_fields(layers, layers, is_bundled=False)
    is_gated = layers.text("model_type") in GATED_TYPES
    return assemble(
        checkpoint,
        format="speculators-mtp",
        algorithm="mtp",
        roles=MTP_ROLES
        if decoder is not None
        else roles_of(style, is_gated=is_gated, is_stream_wide=False),
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=generic.target_hidden_size(layers),
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(layers),
        num_speculative_tokens=tokens,
        geometry=None if tokens is None else chain_geometry(tokens),
        sizes=sizes,
        details={
            **generic.details_of(part, style, matched.tensors, is_bundled=False),
            "norm_weight": "1 + weight" if is_gated else "weight",
        },
    )


def _layer_fields(root: Fields) -> Fields:
    """Return the nested layer config, with its class's defaults when the class is known."""
    section = root.section(_SECTION)
    if section is None:
        if not root.has(_SECTION):
            root.integer(_SECTION, is_required=True)
        return Fields(data={}, pointer=f"/{_SECTION}", findings=root.findings)
    family = family_of(section, absent_model_type="qwen2")
    if family is None:
        return section
    rule = f"{defaults_rule(family)} (the config is a difference to it)"
    return section.with_defaults(CLASS_DEFAULTS[family], rule)


def _refuse_several_layers(root: Fields, found: int) -> None:
    """Report SD205 when config or file hold more than the one layer that the class allows."""
    stated = root.integer(COUNT_KEY, minimum=0) if root.has(COUNT_KEY) else None
    most = max(found, stated or 0)
    if most > 1:
        root.findings.add(
            "SD205",
            where=root.where(COUNT_KEY),
            message=f"{most} prediction layers; a Speculators mtp draft has one",
            expected=1,
            found=most,
        )
