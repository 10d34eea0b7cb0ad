"""The layers of a flat block draft: Qwen3's, or relatives that are described by their sizes only.

The classes that read these files build Qwen3 layers whatever `model_type` says (it is the
target's). Layers with one fused projection, latent attention or Gemma's norms have no `Decoder`;
their shapes are checked all the same, by `DraftCheckpoint.sizes`.
*Source:* z-lab/dflash `Qwen3DFlashAttention`; DeepSeek-V2 and Gemma 4 as transformers names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint import Checkpoint
from specctl.contract.manifest import Decoder
from specctl.contract.roles import TensorRole, generic_role
from specctl.formats.assemble import is_whole, main_file
from specctl.formats.block.places import Sections, settle
from specctl.formats.block.roles import FUSED_ROLES, GEMMA_ROLES, LATENT_ROLES
from specctl.formats.decoder import (
    count_layers,
    layer_conditions,
    read_draft_stack,
    report_layer_count,
)
from specctl.formats.fields import Fields, known_product, known_sum
from specctl.formats.model_types import Family, defaults_rule, flat_defaults
from specctl.formats.names import Matched, NameTable

_FAMILY: Family = "qwen3"
_LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Layers as read.

    Args:
        layers: object with their dimensions and defaults.
        decoder: None for layers that are described by `sizes`.
        roles: table of the backbone's roles.
        sizes: shape symbols, empty with a decoder.
    """

    layers: Fields
    decoder: Decoder | None
    roles: tuple[TensorRole, ...]
    sizes: Mapping[str, int]


def layer_object(sections: Sections) -> Fields:
    """Return the root with the defaults of Qwen3's class, and the window of `swa_window_size`."""
    root = sections.root
    switch = settle(sections.places("dflash_config.use_swa", "use_swa"))
    slides = switch is not None and bool(switch.fields.flag(switch.key))
    window = settle(
        sections.places("dflash_config.swa_window_size", "swa_window_size", "sliding_window")
        if slides
        else sections.places("dflash_config.swa_window_size", "swa_window_size")
    )
    defaults = dict(flat_defaults(_FAMILY))
    if slides and window is not None:
        size = window.fields.integer(window.key)
        if size is not None:
            # The trainer's switch slides every layer.
            defaults |= {"use_sliding_window": True, "sliding_window": size, "max_window_layers": 0}
    return root.with_defaults(defaults, defaults_rule(_FAMILY))


def read_stack(
    checkpoint: Checkpoint,
    names: NameTable,
    *,
    backbone: tuple[TensorRole, ...],
    heads: tuple[TensorRole, ...],
    matched: Matched,
    layers: Fields,
    num_aux_states: int,
    conditions: frozenset[str],
) -> Stack:
    """Return the layers and report the tensors that the file lacks (SD501, SD310).

    Args:
        checkpoint: the opened files.
        names: name table of the dialect.
        backbone: roles of a draft with Qwen3 layers.
        heads: roles outside the backbone.
        matched: tensors by role.
        layers: from `layer_object`.
        num_aux_states: captured states.
        conditions: `when` words of the heads that hold.
    """
    stored = {generic_role(role)[0] for role in matched.tensors}
    if "fc_norm.{i}" in stored:
        conditions |= {"fc_norm"}
    num_layers = count_layers(matched.tensors)
    if is_whole(checkpoint):
        report_layer_count(layers, num_layers)
    roles = _other_roles(stored)
    if roles is None:
        roles = (*backbone, *heads)
        decoder = read_draft_stack(
            checkpoint,
            names,
            roles,
            matched=matched,
            layers=layers,
            family=_FAMILY,
            num_layers=num_layers,
            num_aux_states=num_aux_states,
            head_conditions=conditions,
        )
        return Stack(layers=layers, decoder=decoder, roles=roles, sizes=_heads_size(layers))
    roles = (*roles, *heads)
    if is_whole(checkpoint):
        names.report_missing(
            roles,
            matched,
            layers.findings,
            conditions=conditions | layer_conditions(matched.tensors, layers, "llama"),
            num_layers=max(num_layers, 1),
            num_aux_states=num_aux_states,
            file=main_file(checkpoint),
        )
    return Stack(layers=layers, decoder=None, roles=roles, sizes=_sizes(layers))


def is_latent(matched: Matched) -> bool:
    """Tell whether the layers have latent attention."""
    return "layers.{i}.kv_a_proj.weight" in {generic_role(role)[0] for role in matched.tensors}


def _other_roles(stored: set[str]) -> tuple[TensorRole, ...] | None:
    if "layers.{i}.kv_a_proj.weight" in stored:
        return LATENT_ROLES
    if "layers.{i}.qkv_proj.weight" in stored:
        return FUSED_ROLES
    if "layers.{i}.pre_feedforward_norm" in stored:
        return GEMMA_ROLES
    return None


def _heads_size(layers: Fields) -> dict[str, int]:
    heads = layers.integer("num_attention_heads")
    return {} if heads is None else {"N": heads}


def _sizes(layers: Fields) -> dict[str, int]:
    """Return the shape symbols of layers without a `Decoder`; an absent dimension is left open."""
    hidden = layers.integer("hidden_size", is_required=True)
    inner = layers.integer("intermediate_size", is_required=True)
    heads = layers.integer("num_attention_heads", is_required=True)
    kv_heads = layers.integer("num_key_value_heads")
    dim = layers.integer("head_dim")
    if dim is None and hidden is not None and heads is not None and hidden % heads == 0:
        dim = hidden // heads
    rank, kv_rank, nope, rope, value = (layers.integer(key) for key in _LATENT_KEYS)
    query = known_sum(nope, rope)
    found: dict[str, int | None] = {
        "H": hidden,
        "X": hidden,
        "I": inner,
        "N": heads,
        "P": dim,
        "Q": known_product(heads, dim),
        "KV": known_product(kv_heads, dim),
        "QKV": known_sum(known_product(heads, dim), known_product(2, known_product(kv_heads, dim))),
        "QA": rank,
        "QB": known_product(heads, query),
        "KA": known_sum(kv_rank, rope),
        "KR": kv_rank,
        "KB": known_product(heads, known_sum(nope, value)),
        "OV": known_product(heads, value),
    }
    return {symbol: size for symbol, size in found.items() if size is not None}
