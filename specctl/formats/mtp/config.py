"""Config fields of prediction layers: where they lie, the layer count, the sizes of shapes.

A bundled draft is described by its target's config, which may nest the text model's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint.config_sections import TEXT_SECTIONS
from specctl.formats.fields import (
    Fields,
    ReaderFindings,
    known_product,
    known_sum,
    root_fields,
)
from specctl.formats.model_types import EXPERT_FIELDS
from specctl.formats.mtp.families import COUNT_FIELDS
from specctl.formats.mtp.part import MtpPart

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# Fields of families whose layers are carried by name; each has a meaning in its own engine and
# none is news. What decides a shape is read in `sizes_of`.
_KNOWN = (
    *EXPERT_FIELDS,
    "attn_output_gate",
    "full_attention_interval",
    "hc_count",
    "hc_lowrank",
    "hc_mult",
    "index_head_dim",
    "index_n_heads",
    "index_topk",
    "indexer_budget",
    "indexer_compress_ratio",
    "indexer_head_dim",
    "indexer_kv_heads",
    "indexer_n_heads",
    "kv_lora_rank",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "decoder_sparse_step",
    "mlp_only_layers",
    "mtp_hybrid_override_pattern",
    "num_experts",
    "num_local_experts",
    "num_shared_experts",
    "partial_rotary_factor",
    "ple_layer_ids",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "router_aux_loss_coef",
    "shared_expert_intermediate_size",
    "use_bias",
    "use_qk_norm",
    "v_head_dim",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCount:
    """How many prediction layers a config promises.

    Args:
        field: `file#/pointer` of the field, of the first possible one when none is stated.
        stated: None when no field states a number.
    """

    field: str
    stated: int | None


def text_fields(root: Fields) -> Fields:
    """Return the object with the text model's dimensions: a nested section, or the root."""
    for key in TEXT_SECTIONS:
        value = root.data.get(key)
        if isinstance(value, dict) and any(name in value for name in _SHAPE):
            section = root.section(key)
            return root if section is None else section
        inner = value.get("text_config") if isinstance(value, dict) else None
        if isinstance(inner, dict) and any(name in inner for name in _SHAPE):
            outer = root.section(key)
            nested = None if outer is None else outer.section("text_config")
            return root if nested is None else nested
    return root


def read_count(
    root: Fields, text: Fields, fields: tuple[str, ...] = COUNT_FIELDS
) -> LayerCount | None:
    """Return the first stated count of layers; the text model's object is asked first.

    Returns:
        None when the family has no such field.
    """
    if not fields:
        return None
    for holder in (text, root):
        for key in fields:
            if holder.has(key):
                stated = holder.integer(key, minimum=0)
                return LayerCount(field=holder.where(key), stated=stated)
    return LayerCount(field=text.where(fields[0]), stated=None)


def settle_fields(root: Fields, text: Fields, *, is_bundled: bool) -> None:
    """Enter the fields that need no reader into the account.

    All of a target's config is the target's, and so is what a multimodal config has around its
    text section; of a slice's own config only what is known.
    """
    findings = root.findings
    for holder in (root, text):
        is_around = holder is root and text is not root
        keys = tuple(holder.data) if is_bundled or is_around else (*_KNOWN, *COUNT_FIELDS)
        for key in keys:
            findings.use(f"{holder.pointer}/{key}")


def sizes_of(part: MtpPart | None, text: Fields) -> Mapping[str, int]:
    """Return shape symbol -> elements for layers that have no `Decoder`.

    Attention sizes are left out for a family whose layer has heads of its own.
    """
    hidden, inner = text.integer("hidden_size"), text.integer("intermediate_size")
    known: dict[str, int | None] = {"H": hidden, "X": hidden, "I": inner, "Ht": hidden}
    experts = _first(text, "n_routed_experts", "num_experts", "num_local_experts")
    known |= {"E": experts, "Ie": text.integer("moe_intermediate_size")}
    if part is None or part.family.has_usual_heads:
        known |= _attention_sizes(text, hidden)
    return {symbol: size for symbol, size in known.items() if size is not None}


def _attention_sizes(text: Fields, hidden: int | None) -> dict[str, int | None]:
    heads, kv_heads = text.integer("num_attention_heads"), text.integer("num_key_value_heads")
    dim = text.integer("head_dim")
    if dim is None and hidden is not None and heads is not None and hidden % heads == 0:
        dim = hidden // heads
    return {
        "Q": known_product(heads, dim),
        "KV": known_product(kv_heads or heads, dim),
        "P": dim,
        **_latent_sizes(text, heads),
    }


def _latent_sizes(text: Fields, heads: int | None) -> dict[str, int | None]:
    if not text.has("kv_lora_rank"):
        return {}
    rank, nope = text.integer("kv_lora_rank"), text.integer("qk_nope_head_dim")
    rotary, value = text.integer("qk_rope_head_dim"), text.integer("v_head_dim")
    return {
        "Q": known_product(heads, known_sum(nope, rotary)),
        "KVr": rank,
        "KVa": known_sum(rank, rotary),
        "KVb": known_product(heads, known_sum(nope, value)),
        "Vo": known_product(heads, value),
        "Qr": text.integer("q_lora_rank"),
    }


def _first(fields: Fields, *keys: str) -> int | None:
    key = next((key for key in keys if fields.has(key)), None)
    return None if key is None else fields.integer(key)


def with_count(config: Mapping[str, object], pointer: str, count: int) -> dict[str, object]:
    """Return a config with the field at `/a/b` set; objects on the way are copied."""
    first, _, rest = pointer.removeprefix("/").partition("/")
    result = dict(config)
    if rest:
        inner = result.get(first)
        result[first] = with_count(inner if isinstance(inner, Mapping) else {}, rest, count)
    else:
        result[first] = count
    return result


def count_pointer(config: Mapping[str, object], fields: tuple[str, ...]) -> str | None:
    """Return the pointer of the field that says how many layers there are.

    Returns:
        The field that is stated, else the family's first one beside the text model's dimensions;
        None for a family without such a field.
    """
    root = root_fields(config, ReaderFindings())
    count = read_count(root, text_fields(root), fields)
    return None if count is None else count.field.partition("#")[2]
