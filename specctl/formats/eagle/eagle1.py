"""EAGLE-1, EAGLE-2 and HASS: one layer over fc(embedding, state), the target's head, no map.

EAGLE-2 changes the search only, HASS the training only: their files are EAGLE-1 files. Three
layouts: SafeAILab's flat one, the wrapper of vLLM before its second engine (`model_type` `eagle`,
the draft's config under `model`), and Speculators' type `eagle` (0.1 to 0.6).

Foreign conventions undone: an absent `bias` means a bias to the reference; the first layer has no
input norm; the config may state the target's layer count.
*Source:* SafeAILab/EAGLE `cnets1.py`; vLLM pull requests 6830, 12831 and 14990, issue 11126;
Speculators 0.6 `EagleSpeculatorConfig` and its converter.
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.file_names import CONFIG
from specctl.contract.roles import EAGLE1_ROLES
from specctl.draft import DraftCheckpoint, chain_geometry
from specctl.formats.assemble import NormFlags, assemble, is_whole
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.decoder import count_layers, read_draft_stack, report_layer_count
from specctl.formats.eagle.eagle3 import read_target_hidden, report_unflagged
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import Family, flat_layers
from specctl.formats.names import (
    IGNORED_KEYS,
    Ignored,
    Matched,
    Name,
    NameTable,
    at_layer,
    layer_names,
)
from specctl.formats.speculators import layer_fields, read_token_count, report_gamma_missing
from specctl.formats.vocabulary import identity_vocabulary

HEAD_RULE = "EAGLE-1 drafts use the target's head"

_OUTER: tuple[Name, ...] = (
    Name(role="embedding", keys=("embed_tokens.weight",)),
    Name(role="head", keys=("lm_head.weight",)),
    Name(role="fc.weight", keys=("fc.weight",)),
    Name(role="fc.bias", keys=("fc.bias",)),
)
_LAYERNORMS: tuple[Name, ...] = (
    Name(role="embedding_norm", keys=("embed_layernorm.weight", "post_embedding_layernorm.weight")),
    Name(role="layers.0.input_norm", keys=("hidden_layernorm.weight",)),
    Name(role="norm", keys=("lm_head_layernorm.weight",)),
)
NAMES = NameTable(names=(*_OUTER, *_LAYERNORMS, *layer_names("layers.{i}.")), ignored=IGNORED_KEYS)
WRAPPER_NAMES = NameTable(
    names=(
        Name(role="embedding", keys=("model.embed_tokens.weight", "embed_tokens.weight")),
        *_OUTER[1:],
        Name(role="embedding_norm", keys=("model.embed_layernorm.weight",)),
        *layer_names("model.layers.{i}."),
        Name(role="norm", keys=("model.norm.weight", "norm.weight")),
        *layer_names("layers.{i}."),
    ),
    ignored=IGNORED_KEYS,
)
# Switches of the wrapper that are on when absent, and the norm that each makes an identity.
_SKIPPED: tuple[tuple[str, str, str], ...] = (
    ("skip_prenorm", "layers.{i}.input_norm", r"(model\.)?layers\.0\.input_layernorm\.weight"),
    ("skip_output_norm", "norm", r"(model\.)?norm\.weight"),
)
SPECULATORS_NAMES = NameTable(
    names=(
        Name(role="embedding", keys=("embed_tokens.weight",)),
        Name(role="head", keys=("lm_head.weight",)),
        Name(role="fc.weight", keys=("fusion_fc.weight",)),
        Name(role="fc.bias", keys=("fusion_fc.bias",)),
        Name(role="embedding_norm", keys=("embedding_layernorm.weight",)),
        Name(role="norm", keys=("pre_lm_head_layernorm.weight",)),
        *at_layer(layer_names("transformer."), 0),
    ),
    ignored=IGNORED_KEYS,
)


def read_native(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of SafeAILab's layout; SD318 when nothing says whether `fc` has a bias."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = flat_layers(root, absent_model_type="llama")
    report_gamma_missing(root, CONFIG)
    _report_bias_unstated(checkpoint, root)
    return _read(
        checkpoint,
        format="eagle",
        names=NAMES,
        root=root,
        layers=layers,
        family=family,
        has_bias=root.flag("bias"),
        has_layernorms=None,
        tokens=None,
    )


def read_wrapper(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of the old vLLM wrapper (SD220: current engines do not read it)."""
    root = root_fields(checkpoint.config, ReaderFindings())
    inner = root.section("model") or root
    layers, family = flat_layers(inner, absent_model_type="llama")
    _report_retired(root, "model_type", "vLLM's `eagle` wrapper", "native EAGLE (`eagle`)")
    skipped = [row for row in _SKIPPED if inner.flag(row[0]) is not False]
    tokens = root.integer("num_lookahead_tokens", "geometry.num_speculative_tokens")
    if tokens is None:
        report_gamma_missing(root, CONFIG)
    return _read(
        checkpoint,
        format="vllm-eagle",
        names=_without_norms(skipped),
        root=root,
        layers=layers,
        family=family,
        has_bias=root.flag("eagle_fc_bias"),
        has_layernorms=None,
        tokens=tokens,
    )


def _without_norms(skipped: list[tuple[str, str, str]]) -> NameTable:
    """Return the wrapper's names with the norms that it skips as known and unused."""
    gone = {role for _, role, _ in skipped}
    ignored = tuple(
        Ignored(pattern=pattern, reason=f"`{key}` is not false, so that this norm does nothing")
        for key, _, pattern in skipped
    )
    return NameTable(
        names=tuple(row for row in WRAPPER_NAMES.names if row.role not in gone),
        ignored=(*WRAPPER_NAMES.ignored, *ignored),
    )


def read_speculators(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of Speculators' type `eagle` (SD220: dropped in Speculators 0.7)."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = layer_fields(root, absent_model_type="llama")
    tokens = read_token_count(root, "eagle")
    _report_retired(
        root, "speculators_model_type", "Speculators' type `eagle`", "native EAGLE (`eagle`)"
    )
    root.text("transformer_layer_architecture")
    return _read(
        checkpoint,
        format="speculators-eagle",
        names=SPECULATORS_NAMES,
        root=root,
        layers=layers,
        family=family,
        has_bias=bool(root.flag("fusion_bias")),
        has_layernorms=bool(root.flag("layernorms")),
        tokens=tokens,
    )


def _read(
    checkpoint: Checkpoint,
    *,
    format: str,
    names: NameTable,
    root: Fields,
    layers: Fields,
    family: Family | None,
    has_bias: bool | None,
    has_layernorms: bool | None,
    tokens: int | None,
) -> DraftCheckpoint:
    matched = names.match(checkpoint.tensors, root.findings)
    num_layers = count_layers(matched.tensors)
    layernorms = _has_layernorms(matched, names) if has_layernorms is None else has_layernorms
    target_hidden = read_target_hidden(root, layers)
    if family is not None and is_whole(checkpoint):
        report_layer_count(layers, num_layers)
        _report_denied(matched, root, names, has_bias, has_layernorms)
    decoder = read_draft_stack(
        checkpoint,
        names,
        EAGLE1_ROLES,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=0,
        head_conditions=frozenset(
            word for word, holds in (("fc_bias", has_bias), ("layernorms", layernorms)) if holds
        ),
    )
    return assemble(
        checkpoint,
        format=format,
        algorithm="eagle",
        roles=EAGLE1_ROLES,
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=target_hidden,
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(layers, rule=HEAD_RULE),
        num_speculative_tokens=tokens,
        geometry=None if tokens is None else chain_geometry(tokens),
        flags=NormFlags(has_fc_bias="fc.bias" in matched.tensors),
        details={"layernorms": layernorms},
    )


def _has_layernorms(matched: Matched, names: NameTable) -> bool:
    """Tell whether the norms of `layernorms` are stored; the old wrapper may hold one of them."""
    shown = ("embedding_norm", "norm") if names is NAMES else ("embedding_norm",)
    return any(role in matched.tensors for role in shown)


def _report_denied(
    matched: Matched,
    root: Fields,
    names: NameTable,
    has_bias: bool | None,
    has_layernorms: bool | None,
) -> None:
    """Report SD506 for a bias or norm that the config denies."""
    flags = (
        ("fc.bias", has_bias, "fusion_bias" if names is SPECULATORS_NAMES else "bias"),
        ("embedding_norm", has_layernorms, "layernorms"),
    )
    for role, stated, key in flags:
        ref = matched.tensors.get(role)
        if ref is not None and stated is False:
            report_unflagged(root, tensor_place(ref), ref.key, key)


def _report_bias_unstated(checkpoint: Checkpoint, root: Fields) -> None:
    if root.has("bias") or "fc.bias" in checkpoint.tensors or not is_whole(checkpoint):
        return
    root.findings.add(
        "SD318",
        where=root.where("bias"),
        message="`bias` is absent, which the reference reads as true, and no `fc.bias` is stored",
        expected="`bias`: false",
        found="nothing",
    )


def _report_retired(root: Fields, key: str, what: str, other: str) -> None:
    root.findings.add(
        "SD220",
        where=root.where(key),
        message=f"{what} is read by no current engine",
        expected=other,
        found=root.raw(key) or "nothing",
    )
