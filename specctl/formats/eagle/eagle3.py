"""EAGLE-3 as all its dialects store it: names, norm flags, and the assembly they share.

*Source:* SafeAILab/EAGLE `eagle/model/cnets.py` (midlayer, fc, d2t, t2d); Speculators eagle3 for
`norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`; SGLang `llama_eagle3.py` for
`aux_norm_low`, `aux_norm_mid`, `aux_norm_high`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.manifest import Geometry
from specctl.contract.roles import EAGLE3_ROLES, TensorRole
from specctl.draft import Algorithm, DraftCheckpoint, chain_geometry
from specctl.formats.assemble import (
    NO_BLOCK,
    NO_DETAILS,
    BlockFacts,
    NormFlags,
    assemble,
    is_whole,
)
from specctl.formats.aux_layers import AuxFacts
from specctl.formats.decoder import count_layers, read_draft_stack, report_layer_count
from specctl.formats.eagle.side_files import with_side_map
from specctl.formats.fields import Fields
from specctl.formats.model_types import Family
from specctl.formats.names import (
    IGNORED_KEYS,
    Matched,
    Name,
    NameTable,
    at_layer,
    layer_names,
)
from specctl.formats.vocabulary import read_vocabulary, report_library_map, report_map_order

VOCABULARY_NAMES: tuple[Name, ...] = (
    Name(role="embedding", keys=("embed_tokens.weight", "model.embed_tokens.weight")),
    Name(role="head", keys=("lm_head.weight",)),
    Name(role="d2t", keys=("d2t", "model.d2t", "draft_id_to_target_id")),
    Name(role="t2d", keys=("t2d", "model.t2d")),
)

_LEGACY_FC_NORMS: tuple[Name, ...] = tuple(
    Name(role=f"fc_norm.{i}", keys=(f"aux_norm_{level}.weight",))
    for i, level in enumerate(("low", "mid", "high"))
)
_GLOBAL_NAMES: tuple[Name, ...] = (
    *VOCABULARY_NAMES,
    Name(role="fc.weight", keys=("fc.weight",)),
    Name(role="fc.bias", keys=("fc.bias",)),
    Name(role="input_norm", keys=("input_norm.weight",)),
    Name(role="fc_norm.{i}", keys=("fc_norm.{i}.weight",)),
    *_LEGACY_FC_NORMS,
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


def wrapped(names: tuple[Name, ...]) -> tuple[Name, ...]:
    """Return the names as they are with all but the vocabulary inside a module `model`."""
    top = ("lm_head.", "d2t", "t2d", "draft_id", "mask_hidden", "model.")
    return tuple(
        Name(
            role=row.role,
            keys=tuple(key if key.startswith(top) else f"model.{key}" for key in row.keys),
        )
        for row in names
    )


# All dialects read both spellings of the first layer, with and without the wrapping module; they
# differ in the one that they write.
_WRAPPED = wrapped((*_GLOBAL_NAMES[len(VOCABULARY_NAMES) :], *_FLAT_LAYERS, *_MIDLAYER))
SPECULATORS_NAMES = NameTable(
    names=(*_GLOBAL_NAMES, *_FLAT_LAYERS, *_MIDLAYER, *_WRAPPED), ignored=IGNORED_KEYS
)
SAFEAILAB_NAMES = NameTable(
    names=(*_GLOBAL_NAMES, *_MIDLAYER, *_FLAT_LAYERS, *_WRAPPED), ignored=IGNORED_KEYS
)
NEMO_NAMES = NameTable(
    names=(
        Name(role="embedding", keys=("model.embed_tokens.weight", "embed_tokens.weight")),
        *VOCABULARY_NAMES[1:],
        *_WRAPPED,
        *_GLOBAL_NAMES[len(VOCABULARY_NAMES) :],
        *_FLAT_LAYERS,
        *_MIDLAYER,
    ),
    ignored=IGNORED_KEYS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What distinguishes the dialects once their configs are read.

    Args:
        format: registry name.
        names: name table.
        roles: which tensors there are.
        algorithm: `eagle3` or a relative.
        is_every_layer_wide: layers after the first also read (embedding, state).
        is_library: Speculators' own library reads it, which wants ascending ids and a mask.
        is_ranked: its maps are in the order of frequency.
    """

    format: str
    names: NameTable
    roles: tuple[TensorRole, ...] = EAGLE3_ROLES
    algorithm: Algorithm = "eagle3"
    is_every_layer_wide: bool = False
    is_library: bool = False
    is_ranked: bool = False


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
    block: BlockFacts = NO_BLOCK,
    geometry: Geometry | None = None,
    target_num_layers: int | None = None,
    details: Mapping[str, object] = NO_DETAILS,
) -> DraftCheckpoint:
    """Return the draft from its config facts and tensors.

    Args:
        checkpoint: the opened files.
        dialect: format, name table and roles.
        root: config root.
        layers: object with the layer's dimensions, equal to `root` in a flat config.
        family: of the layers, None when it is not supported.
        aux: captured layers.
        num_speculative_tokens: as the file declares it.
        flags: as the config states them; `has_fc_bias` is what the config promises, the fact is
            taken from the tensors.
        block: mask token of a parallel draft.
        geometry: of a parallel draft; a chain's follows from the token count.
        target_num_layers: when the config states it.
        details: what only this dialect has.
    """
    matched = dialect.names.match(checkpoint.tensors, root.findings)
    num_layers = count_layers(matched.tensors)
    target_hidden = read_target_hidden(root, layers)
    if family is not None and is_whole(checkpoint):
        report_layer_count(layers, num_layers)
        flags = settle_norms(matched, flags, root)
    decoder = read_draft_stack(
        checkpoint,
        dialect.names,
        dialect.roles,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=aux.num_states or 0,
        head_conditions=flag_conditions(flags),
    )
    sizes: dict[str, int] = {}
    if decoder is not None:
        sizes["X0"] = 2 * decoder.hidden_size
        if dialect.is_every_layer_wide:
            sizes["X"] = sizes["X0"]
    vocabulary = read_vocabulary(checkpoint, matched, root=root, layers=layers)
    if dialect.is_library:
        report_library_map(vocabulary, matched, root.findings)
    elif not dialect.is_ranked:
        report_map_order(vocabulary, matched, root.findings)
    gamma = num_speculative_tokens
    chain = None if gamma is None else chain_geometry(gamma)
    return assemble(
        checkpoint,
        format=dialect.format,
        algorithm=dialect.algorithm,
        roles=dialect.roles,
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=target_hidden,
        target_num_layers=target_num_layers,
        aux=aux,
        vocabulary=with_side_map(checkpoint, vocabulary, root.findings),
        num_speculative_tokens=gamma,
        geometry=chain if geometry is None else geometry,
        flags=replace(flags, has_fc_bias="fc.bias" in matched.tensors),
        block=block,
        sizes=sizes,
        details=details,
    )


def read_norm_flags(
    root: Fields,
    *,
    has_norm_before_residual: bool,
    nested: Fields | None = None,
) -> NormFlags:
    """Return the flags of a config; absent ones are false (SD208 when two exclude each other).

    Args:
        root: config root.
        has_norm_before_residual: as the dialect reads it.
        nested: `eagle_config`, where NVIDIA's files state flags (vLLM pull request 42143); it
            decides, and a different value beside it is SD208.
    """
    before_fc = _flag(root, nested, "norm_before_fc", "draft.has_norm_before_fc")
    fc_norm = _flag(root, nested, "fc_norm", "draft.has_fc_norm")
    if not fc_norm and root.has("use_aux_norm"):  # older SGLang drafts
        fc_norm = bool(root.flag("use_aux_norm", "draft.has_fc_norm"))
    if before_fc and fc_norm:
        root.findings.add(
            "SD208",
            where=root.where("fc_norm"),
            message="`norm_before_fc` and `fc_norm` exclude each other and are both true",
            expected="one of them",
            found="both",
        )
    return NormFlags(
        has_fc_bias=bool(root.flag("bias")),
        has_norm_before_residual=has_norm_before_residual,
        has_norm_before_fc=before_fc,
        has_fc_norm=fc_norm,
        has_norm_output=_flag(root, nested, "norm_output", "draft.has_norm_output"),
    )


def _flag(root: Fields, nested: Fields | None, key: str, path: str) -> bool:
    holders = [fields for fields in (nested, root) if fields is not None and fields.has(key)]
    if not holders:
        root.findings.derived(path, root.where(key), "false when absent (all readers agree)")
        return False
    value = holders[0].flag(key, path)
    if holders[1:] and holders[1].flag(key) != value:
        root.findings.add(
            "SD208",
            where=root.where(key),
            message=f"`{key}` differs from the one in `eagle_config`",
            expected=holders[0].raw(key),
            found=holders[1].raw(key),
        )
    return bool(value)


def read_target_hidden(root: Fields, layers: Fields) -> int | None:
    """Return the width of one captured state; the draft's own when the config states none."""
    path = "draft.target_hidden_size"
    stated = root.integer("target_hidden_size", path)
    if stated is not None or root.has("target_hidden_size"):
        return stated
    root.findings.derived(
        path, layers.where("hidden_size"), "the draft's own width when target_hidden_size is absent"
    )
    return layers.integer("hidden_size")


def flag_conditions(flags: NormFlags) -> frozenset[str]:
    """Return the `when` words of the role table that the flags make true."""
    words = {
        "fc_bias": flags.has_fc_bias,
        "norm_before_fc": flags.has_norm_before_fc,
        "fc_norm": flags.has_fc_norm,
    }
    return frozenset(word for word, holds in words.items() if holds)


def settle_norms(matched: Matched, flags: NormFlags, root: Fields) -> NormFlags:
    """Return the flags with those of stored norms; SD506 where the config does not say so.

    A norm is stored only by a class that applies it, so an absent flag follows from the tensor. A
    flag that is false beside the tensor is a contradiction (an error): without a norm that it was
    trained with, the draft runs and nearly every token is refused.
    """
    before_fc = _settled(matched, root, "input_norm", "norm_before_fc", flags.has_norm_before_fc)
    fc_norm = _settled(matched, root, "fc_norm.0", "fc_norm", flags.has_fc_norm)
    return replace(flags, has_norm_before_fc=before_fc, has_fc_norm=fc_norm)


def _settled(matched: Matched, root: Fields, role: str, key: str, holds: bool) -> bool:
    ref = matched.tensors.get(role)
    if ref is None or holds:
        return holds
    path, findings = f"draft.has_{key}", root.findings
    is_absent = findings.origins[path].kind == "derived"
    findings.add(
        "SD506",
        where=tensor_place(ref),
        message=f"`{ref.key}` is stored and `{key}` is "
        + ("absent; it is read as true" if is_absent else "false"),
        expected=f"`{key}`: true",
        found="nothing" if is_absent else "false",
        severity=None if is_absent else "error",
    )
    if is_absent:
        findings.derived(path, tensor_place(ref), "the norm is stored")
    return is_absent


def report_unflagged(fields: Fields, where: str, tensor: str, key: str) -> None:
    """Report SD506: a tensor is stored whose flag is false or absent."""
    stated = fields.raw(key)
    fields.findings.add(
        "SD506",
        where=where,
        message=f"`{tensor}` is stored and `{key}` is " + ("absent" if stated is None else "false"),
        expected=f"`{key}`: true",
        found="nothing" if stated is None else stated,
    )
