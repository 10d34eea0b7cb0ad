"""Gemma-4's assistant: a small decoder that reads the target's keys and values instead of its own.

`pre_projection` joins the target's embedding of the last token, scaled as the target scales it, and
the target's state, embedding first; `post_projection` gives the state that a second step reads.
Layers have no key or value projections: those of the target's last full and sliding layers are
used frozen. The head is the draft's own embedding; `masked_embedding` narrows it to the tokens of
the best centroids, in an order that is a permutation of the whole vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import TensorRef
from specctl.contract.roles import ALWAYS, OPTIONAL, TensorRole
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import assemble, is_whole, main_file
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.decoder import count_layers, report_layer_count
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.names import ROTARY_BUFFER, Ignored, Name, NameTable
from specctl.formats.speculators import report_gamma_missing
from specctl.formats.vocabulary import identity_vocabulary

_LAYER_PARTS: tuple[tuple[str, str], ...] = (
    ("q_proj.weight", "self_attn.q_proj.weight"),
    ("q_norm", "self_attn.q_norm.weight"),
    ("o_proj.weight", "self_attn.o_proj.weight"),
    ("gate_proj.weight", "mlp.gate_proj.weight"),
    ("up_proj.weight", "mlp.up_proj.weight"),
    ("down_proj.weight", "mlp.down_proj.weight"),
    ("input_norm", "input_layernorm.weight"),
    ("post_attention_norm", "post_attention_layernorm.weight"),
    ("pre_feedforward_norm", "pre_feedforward_layernorm.weight"),
    ("post_feedforward_norm", "post_feedforward_layernorm.weight"),
    ("layer_scalar", "layer_scalar"),
)
NAMES = NameTable(
    names=(
        Name(role="embedding", keys=("model.embed_tokens.weight",)),
        Name(role="norm", keys=("model.norm.weight",)),
        Name(role="pre_projection.weight", keys=("pre_projection.weight",)),
        Name(role="post_projection.weight", keys=("post_projection.weight",)),
        Name(role="centroids.weight", keys=("masked_embedding.centroids.weight",)),
        Name(role="token_ordering", keys=("masked_embedding.token_ordering",)),
        *(
            Name(role=f"layers.{{i}}.{role}", keys=(f"model.layers.{{i}}.{key}",))
            for role, key in _LAYER_PARTS
        ),
    ),
    ignored=(
        ROTARY_BUFFER,
        Ignored(pattern=r"lm_head\.weight", reason="the head is the draft's own embedding"),
    ),
)


def _role(name: str, *shape: str, when: str = ALWAYS) -> TensorRole:
    return TensorRole(name=name, shape=shape, when=when)


ROLES: tuple[TensorRole, ...] = (
    _role("embedding", "V", "H"),
    _role("pre_projection.weight", "H", "2*Ht"),
    _role("post_projection.weight", "Ht", "H"),
    _role("centroids.weight", "K", "H", when="ordered"),
    _role("layers.{i}.q_proj.weight", "?", "H"),
    _role("layers.{i}.q_norm", "?"),
    _role("layers.{i}.o_proj.weight", "H", "?"),
    _role("layers.{i}.gate_proj.weight", "I", "H"),
    _role("layers.{i}.up_proj.weight", "I", "H"),
    _role("layers.{i}.down_proj.weight", "H", "I"),
    _role("layers.{i}.input_norm", "H"),
    _role("layers.{i}.post_attention_norm", "H"),
    _role("layers.{i}.pre_feedforward_norm", "H"),
    _role("layers.{i}.post_feedforward_norm", "H"),
    _role("layers.{i}.layer_scalar", "1", when=OPTIONAL),
    _role("norm", "H"),
)
_MUST_BE: tuple[tuple[str, object], ...] = (
    ("hidden_size_per_layer_input", 0),
    ("vocab_size_per_layer_input", 0),
    ("enable_moe_block", False),
    ("use_double_wide_mlp", False),
)
_DEFAULTS = {
    "backbone_hidden_size": 1536,
    "centroid_intermediate_top_k": 32,
    "num_centroids": 2048,
    "use_ordered_embeddings": False,
}
_DEFAULTS_RULE = "default of transformers Gemma4AssistantConfig"
_KNOWN = (
    "attention_k_eq_v",
    "final_logit_softcapping",
    "global_head_dim",
    "hidden_activation",
    "layer_types",
    "num_global_key_value_heads",
    "rope_parameters",
    "use_bidirectional_attention",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """The narrowed head: `centroids` tells whether the config asks for it."""

    is_ordered: bool
    num_centroids: int | None
    top_k: int | None


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics.

    Diagnostics: SD207 (a switch that the class refuses), SD310, SD404 (the ordering repeats a
    token), SD501, SD503 (queries of another width than the layer's kind has), SD506
    (ordering stored and not asked for).
    """
    root = root_fields(checkpoint.config, ReaderFindings()).with_defaults(_DEFAULTS, _DEFAULTS_RULE)
    text = root.section("text_config") or root
    matched = NAMES.match(checkpoint.tensors, root.findings)
    head = _Head(
        is_ordered=bool(root.flag("use_ordered_embeddings")),
        num_centroids=root.integer("num_centroids"),
        top_k=root.integer("centroid_intermediate_top_k"),
    )
    num_layers = count_layers(matched.tensors)
    if is_whole(checkpoint):
        report_layer_count(text, num_layers)
        NAMES.report_missing(
            ROLES,
            matched,
            root.findings,
            conditions=frozenset({"ordered"} if head.is_ordered else ()),
            num_layers=max(num_layers, 1),
            num_aux_states=0,
            file=main_file(checkpoint),
        )
    _check_switches(text, num_layers)
    _check_heads(text, matched.tensors, num_layers)
    _check_ordering(checkpoint, matched.tensors.get("token_ordering"), head, root)
    report_gamma_missing(root, CONFIG)
    for key in _KNOWN:
        text.raw(key)
    sizes = {
        "H": text.integer("hidden_size", is_required=True),
        "I": text.integer("intermediate_size", is_required=True),
    }
    sizes["K"] = head.num_centroids
    return assemble(
        checkpoint,
        format="gemma4-assistant",
        algorithm="gemma4_assistant",
        roles=ROLES,
        root=root,
        layers=text,
        matched=matched,
        decoder=None,
        target_hidden_size=root.integer("backbone_hidden_size", "draft.target_hidden_size"),
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(text),
        num_speculative_tokens=None,
        geometry=None,
        sizes={symbol: size for symbol, size in sizes.items() if size is not None},
        details={
            "concat_order": "embedding, hidden",
            "hidden_input": "target state after its final norm",
            "embedding_input": "target embedding times sqrt(target hidden size)",
            "keys_and_values": "the target's last full and sliding layers, frozen",
            "use_ordered_embeddings": head.is_ordered,
            "num_centroids": head.num_centroids,
            "centroid_intermediate_top_k": head.top_k,
            "num_layers": num_layers,
        },
    )


def _check_switches(text: Fields, num_layers: int) -> None:
    shared = ("num_kv_shared_layers", num_layers)
    for key, wanted in (*_MUST_BE, shared):
        value = text.raw(key)
        if value and value != wanted:  # 0 shared layers means all of them
            text.findings.add(
                "SD207",
                where=text.where(key),
                message=f"`{key}` is {value}; an assistant has {wanted}",
                expected=wanted,
                found=value,
            )


def _check_heads(text: Fields, tensors: Mapping[str, TensorRef], num_layers: int) -> None:
    """Report SD503 for queries of another width than a layer's kind has.

    Layers with full attention may have wider heads than those that slide.
    """
    heads, dim = text.integer("num_attention_heads"), text.integer("head_dim")
    wide = text.integer("global_head_dim") or dim
    types = text.texts("layer_types")
    if heads is None or dim is None or wide is None or len(types) < num_layers:
        return
    for index in range(num_layers):
        width = wide if types[index] == "full_attention" else dim
        for role, place, wanted in (
            ("q_proj.weight", 0, heads * width),
            ("o_proj.weight", 1, heads * width),
            ("q_norm", 0, width),
        ):
            ref = tensors.get(f"layers.{index}.{role}")
            if ref is not None and len(ref.shape) > place and ref.shape[place] != wanted:
                text.findings.add(
                    "SD503",
                    where=tensor_place(ref),
                    message=f"`{ref.key}` is {list(ref.shape)}; {heads} heads of a layer of type "
                    f"`{types[index]}` are {width} wide",
                    expected=f"{wanted} in dimension {place}",
                    found=list(ref.shape),
                )


def _check_ordering(
    checkpoint: Checkpoint, ref: TensorRef | None, head: _Head, root: Fields
) -> None:
    if ref is None:
        return
    if not head.is_ordered:
        root.findings.add(
            "SD506",
            where=tensor_place(ref),
            message=f"`{ref.key}` is stored and `use_ordered_embeddings` is not true",
            expected="`use_ordered_embeddings`: true",
            found="false",
        )
    try:
        order = checkpoint.read_ints(ref.key)
    except DiagnosticError as error:
        root.findings.extend(error.diagnostics)
        return
    if sorted(order) != list(range(len(order))):
        counts = Counter(order)
        twice = next((t for t in order if counts[t] > 1 or not 0 <= t < len(order)), order[0])
        root.findings.add(
            "SD404",
            where=tensor_place(ref),
            message=f"the ordering is no permutation of {len(order)} tokens; {twice} repeats or "
            "lies outside",
            expected=f"every id from 0 to {len(order) - 1} once",
            found=f"{len(set(order))} different ids",
        )
