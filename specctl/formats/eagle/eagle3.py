"""EAGLE-3 as both its dialects store it: names, norm flags, and the assembly they share.

*Source:* SafeAILab/EAGLE `eagle/model/cnets.py` (midlayer, fc, d2t, t2d); Speculators eagle3 for
`norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.roles import EAGLE3_ROLES
from specctl.draft import DraftCheckpoint, chain_geometry
from specctl.formats.assemble import (
    NormFlags,
    assemble,
    is_whole,
)
from specctl.formats.aux_layers import AuxFacts
from specctl.formats.decoder import count_layers, read_draft_stack, report_layer_count
from specctl.formats.fields import Fields
from specctl.formats.model_types import Family
from specctl.formats.names import (
    ROTARY_BUFFER,
    Ignored,
    Matched,
    Name,
    NameTable,
    at_layer,
    layer_names,
)
from specctl.formats.vocabulary import read_vocabulary

IGNORED_KEYS: tuple[Ignored, ...] = (
    ROTARY_BUFFER,
    Ignored(
        pattern=r"verifier_(lm_head|norm)\.weight",
        reason="a copy of the target's weights, kept by training",
    ),
)

VOCABULARY_NAMES: tuple[Name, ...] = (
    Name(role="embedding", keys=("embed_tokens.weight", "model.embed_tokens.weight")),
    Name(role="head", keys=("lm_head.weight",)),
    Name(role="d2t", keys=("d2t", "model.d2t", "draft_id_to_target_id")),
    Name(role="t2d", keys=("t2d", "model.t2d")),
)

_GLOBAL_NAMES: tuple[Name, ...] = (
    *VOCABULARY_NAMES,
    Name(role="fc.weight", keys=("fc.weight",)),
    Name(role="fc.bias", keys=("fc.bias",)),
    Name(role="input_norm", keys=("input_norm.weight",)),
    Name(role="fc_norm.{i}", keys=("fc_norm.{i}.weight",)),
    Name(role="norm", keys=("norm.weight",)),
)
_FLAT_LAYERS: tuple[Name, ...] = (
    Name(role="layers.0.hidden_norm", keys=("layers.0.hidden_norm.weight",)),
    *layer_names("layers.{i}."),
)
_MIDLAYER: tuple[Name, ...] = (
    Name(role="layers.0.hidden_norm", keys=("midlayer.hidden_norm.weight",)),
    *at_layer(layer_names("midlayer."), 0),
)

# Both dialects read both spellings of the first layer; they differ in the one that they write.
SPECULATORS_NAMES = NameTable(
    names=(*_GLOBAL_NAMES, *_FLAT_LAYERS, *_MIDLAYER), ignored=IGNORED_KEYS
)
SAFEAILAB_NAMES = NameTable(names=(*_GLOBAL_NAMES, *_MIDLAYER, *_FLAT_LAYERS), ignored=IGNORED_KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What distinguishes the dialects once their configs are read."""

    format: str
    names: NameTable


def read_eagle3(
    checkpoint: Checkpoint,
    dialect: Dialect,
    *,
    root: Fields,
    layers: Fields,
    family: Family | None,
    aux: AuxFacts,
    num_speculative_tokens: int | None,
    flags: NormFlags,
) -> DraftCheckpoint:
    """Return the draft from its config facts and tensors.

    Args:
        checkpoint: the opened files.
        dialect: format and name table.
        root: config root.
        layers: object with the layer's dimensions, equal to `root` in a flat config.
        family: of the layers, None when it is not supported.
        aux: captured layers.
        num_speculative_tokens: as the file declares it.
        flags: as the config states them; the fc bias is taken from the tensors.
    """
    matched = dialect.names.match(checkpoint.tensors, root.findings)
    num_layers = count_layers(matched.tensors)
    target_hidden = read_target_hidden(root, layers)
    if family is not None and is_whole(checkpoint):
        report_layer_count(layers, num_layers)
        _report_flags(matched, flags, root)
    decoder = read_draft_stack(
        checkpoint,
        dialect.names,
        EAGLE3_ROLES,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=aux.num_states or 0,
        head_conditions=_flag_conditions(flags),
    )
    gamma = num_speculative_tokens
    return assemble(
        checkpoint,
        format=dialect.format,
        algorithm="eagle3",
        roles=EAGLE3_ROLES,
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=target_hidden,
        target_num_layers=None,
        aux=aux,
        vocabulary=read_vocabulary(checkpoint, matched, root=root, layers=layers),
        num_speculative_tokens=gamma,
        geometry=None if gamma is None else chain_geometry(gamma),
        flags=NormFlags(
            has_fc_bias="fc.bias" in matched.tensors,
            has_norm_before_residual=flags.has_norm_before_residual,
            has_norm_before_fc=flags.has_norm_before_fc,
            has_fc_norm=flags.has_fc_norm,
            has_norm_output=flags.has_norm_output,
        ),
    )


def read_norm_flags(root: Fields, *, has_norm_before_residual: bool) -> NormFlags:
    """Return the flags of a config; absent ones are false (SD208 when two exclude each other)."""
    before_fc = _flag(root, "norm_before_fc", "draft.has_norm_before_fc")
    fc_norm = _flag(root, "fc_norm", "draft.has_fc_norm")
    if before_fc and fc_norm:
        root.findings.add(
            "SD208",
            where=root.where("fc_norm"),
            message="`norm_before_fc` and `fc_norm` exclude each other and are both true",
            expected="one of them",
            found="both",
        )
    return NormFlags(
        has_norm_before_residual=has_norm_before_residual,
        has_norm_before_fc=before_fc,
        has_fc_norm=fc_norm,
        has_norm_output=_flag(root, "norm_output", "draft.has_norm_output"),
    )


def _flag(root: Fields, key: str, path: str) -> bool:
    value = root.flag(key, path)
    if value is None:
        root.findings.derived(path, root.where(key), "false when absent (all readers agree)")
    return bool(value)


def read_target_hidden(root: Fields, layers: Fields) -> int | None:
    path = "draft.target_hidden_size"
    stated = root.integer("target_hidden_size", path)
    if stated is not None or root.has("target_hidden_size"):
        return stated
    root.findings.derived(
        path, layers.where("hidden_size"), "the draft's own width when target_hidden_size is absent"
    )
    return layers.integer("hidden_size")


def _flag_conditions(flags: NormFlags) -> frozenset[str]:
    words = {"norm_before_fc": flags.has_norm_before_fc, "fc_norm": flags.has_fc_norm}
    return frozenset(word for word, holds in words.items() if holds)


def _report_flags(matched: Matched, flags: NormFlags, root: Fields) -> None:
    pairs = (
        ("input_norm", "norm_before_fc", flags.has_norm_before_fc),
        ("fc_norm.0", "fc_norm", flags.has_fc_norm),
    )
    for role, key, holds in pairs:
        ref = matched.tensors.get(role)
        if ref is not None and not holds:
            root.findings.add(
                "SD506",
                where=tensor_place(ref),
                message=f"`{ref.key}` is stored and `{key}` is "
                + ("false" if root.has(key) else "absent"),
                expected=f"`{key}`: true",
                found="nothing" if root.raw(key) is None else root.raw(key),
            )
