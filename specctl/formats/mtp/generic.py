"""Read the prediction layers of any family in the table, bundled in a target or alone.

Invariants: every tensor of the layers has one role; of a target, nothing else is looked at. What
the config promises and what is stored are compared in both directions (SD310, SD326). The runtime
computes dense layers of the DeepSeek layout; all others have no `decoder`, and their shapes are
checked with `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Decoder
from specctl.contract.roles import MTP_ROLES, TensorRole, roles_of_draft
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import assemble, is_whole
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.decoder import read_draft_stack, report_layer_count
from specctl.formats.embedding import is_decoy_part
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import Family, family_of, with_class_defaults
from specctl.formats.mtp.checks import report_counts, report_experts, report_required
from specctl.formats.mtp.config import read_count, settle_fields, sizes_of, text_fields
from specctl.formats.mtp.family import MtpFamily
from specctl.formats.mtp.part import SHARED_KEYS, MtpPart, find_part
from specctl.formats.mtp.roles import STACK_ROLES, roles_of
from specctl.formats.mtp.style import LayerStyle, read_style
from specctl.formats.names import (
    IGNORED_KEYS,
    Matched,
    Name,
    NameTable,
    at_layer,
    layer_names,
)
from specctl.formats.speculators import report_gamma_missing
from specctl.formats.vocabulary import identity_vocabulary


def read(family: MtpFamily, checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    part = find_part(family, checkpoint.tensors) or empty_part(family)
    is_bundled = _is_bundled(part, checkpoint)
    if is_bundled:
        own = {key: entry for key, entry in checkpoint.tensors.items() if key in part.roles}
        checkpoint = replace(checkpoint, tensors=own)
    root = root_fields(checkpoint.config, ReaderFindings())
    text = text_fields(root)
    report_gamma_missing(root, CONFIG)
    names = names_of(part)
    matched = names.match(checkpoint.tensors, root.findings)
    style = read_style(matched.tensors)
    layers = with_class_defaults(text, absent_model_type="llama")
    decoder = decoder_of(checkpoint, part, style, names=names, matched=matched, layers=layers)
    target_num_layers = _depth(part, checkpoint, text, is_bundled=is_bundled)
    is_gated = family.is_gated and text.raw("attn_output_gate") is not False
    if decoder is None and is_whole(checkpoint):
        report_required(part, style, matched, root.findings, checkpoint=checkpoint)
    sizes = {} if decoder is not None else sizes_of(part, text)
    report_experts(part, style, matched, root.findings, sizes)
    report_counts(
        part,
        read_count(root, text, family.count_fields),
        root.findings,
        is_promised=checkpoint.config is not None,
    )
    settle_fields(root, text, is_bundled=is_bundled)
    return assemble(
        checkpoint,
        format=family.name,
        algorithm="mtp",
        roles=_roles(part, style, decoder=decoder, is_gated=is_gated),
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=target_hidden_size(layers),
        target_num_layers=target_num_layers,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(layers),
        num_speculative_tokens=None,
        geometry=None,
        sizes=sizes,
        details=details_of(part, style, matched.tensors, is_bundled=is_bundled),
    )


def names_of(part: MtpPart) -> NameTable:
    """Return the name table of the part: what is stored, and how what is not would be named."""
    rows: dict[str, list[str]] = {}
    for key, role in part.roles.items():
        rows.setdefault(role, []).append(key)
    for role, _ in part.family.names:
        own = part.key_of(role)
        if role not in rows and own is not None and own not in part.roles:
            rows[role] = [own]
        for place in range(part.num_layers if part.num_layers > 1 else 0):
            in_layer = f"layers.{place}.{role}"
            named = part.key_of(in_layer)
            if in_layer not in rows and named is not None:
                rows[in_layer] = [named]
    for shared, role in SHARED_KEYS:
        if shared not in rows.setdefault(role, []):
            rows[role].append(shared)
    table = [Name(role=role, keys=tuple(keys)) for role, keys in rows.items()]
    if part.family.block_style == "llama" and part.indexes:
        for place, prefix in enumerate(part.layer_prefixes):
            dense = at_layer(layer_names(prefix), place)
            table += [row for row in dense if row.role not in rows]
    return NameTable(names=tuple(table), ignored=IGNORED_KEYS)


def details_of(
    part: MtpPart, style: LayerStyle, roles: Mapping[str, object], *, is_bundled: bool
) -> dict[str, object]:
    """Return what only prediction layers have, for reports and writers."""
    family = part.family
    return {
        "family": family.name,
        "is_bundled": is_bundled,
        "num_prediction_layers": part.num_layers,
        "stored_layer_indexes": list(part.indexes),
        "key_prefix": part.root,
        "concat_order": family.concat_order,
        "hidden_input": family.hidden_input,
        "recycled_hidden": family.recycled,
        "norm_weight": family.norm_weight,
        "attention": style.attention,
        "has_output_gate": style.has_output_gate,
        "has_indexer": style.has_indexer,
        "mlp": style.mlp,
        "num_experts": style.num_experts,
        "embedding": _policy(roles, "embedding"),
        "head": _policy(roles, "head"),
    }


def _policy(roles: Mapping[str, object], name: str) -> str:
    is_own = name in roles or any(role.endswith(f".{name}") for role in roles)
    return "own copy" if is_own else "the target's"


def empty_part(family: MtpFamily, *indexes: int) -> MtpPart:
    """Return a part without tensors: of a config alone, or of a file to be written."""
    return MtpPart(family=family, root=family.roots[0], indexes=indexes, num_fused=1, roles={})


def _is_bundled(part: MtpPart, checkpoint: Checkpoint) -> bool:
    """Tell whether layers of a target lie beside the part."""
    own = part.layer_prefixes
    return any(
        ".layers." in f".{key}"
        and key not in part.roles
        and not key.endswith("rotary_emb.inv_freq")
        and not is_decoy_part(key)
        and not (own and key.startswith(own))
        for key in checkpoint.tensors
    )


def decoder_of(
    checkpoint: Checkpoint,
    part: MtpPart,
    style: LayerStyle,
    *,
    names: NameTable,
    matched: Matched,
    layers: Fields,
    absent: Family = "llama",
) -> Decoder | None:
    """Return the shape of the layers when the runtime computes them, else None.

    Args:
        checkpoint: the opened files.
        part: the layers.
        style: their kind.
        names: their name table.
        matched: their tensors by role.
        layers: config object with the dimensions.
        absent: family of a config without a `model_type`.
    """
    family = family_of(layers, absent_model_type=absent)
    is_whole_each = part.num_layers <= 1 or part.num_fused == len(part.indexes)
    is_known = style.is_plain or not matched.tensors
    if family is None or not (part.family.is_served and is_whole_each and is_known):
        return None
    num_layers = max(part.num_layers, 1)
    return read_draft_stack(
        checkpoint,
        names,
        roles_of_draft("mtp", num_layers),
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=0,
    )


def _roles(
    part: MtpPart, style: LayerStyle, *, decoder: Decoder | None, is_gated: bool
) -> tuple[TensorRole, ...]:
    if decoder is not None:
        return MTP_ROLES if decoder.num_layers == 1 else STACK_ROLES
    is_wide = part.family.concat_order == "separate matrices"
    return roles_of(style, is_gated=is_gated, is_stream_wide=is_wide)


def _depth(part: MtpPart, checkpoint: Checkpoint, text: Fields, *, is_bundled: bool) -> int | None:
    """Return the layers that the numbering gives the target, having compared the config's.

    A slice that was numbered again from 0 (SGLang's NextN export does) says nothing of its target.
    """
    if not part.family.is_after_trunk or (not is_bundled and part.indexes[:1] == (0,)):
        return None
    stated = text.integer("num_hidden_layers", minimum=0)
    first = part.indexes[0] if part.indexes else stated
    if first is not None and is_whole(checkpoint):
        report_layer_count(text, first)
    return first


def target_hidden_size(layers: Fields) -> int | None:
    """Return the width of a target state, which is the layer's own."""
    rule = "an MTP layer has the target's width"
    layers.findings.derived("draft.target_hidden_size", layers.where("hidden_size"), rule)
    return layers.integer("hidden_size", is_required=True)
