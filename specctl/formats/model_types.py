"""Model types that can be read and the defaults of their config classes.

A nested Speculators config is written as a difference to its class's defaults, so an absent key has
that value. A flat config states its dimensions; only keys that the library itself leaves out may
fall back there.
*Source:* transformers 5.24 `LlamaConfig`, `MistralConfig`, `Qwen2Config`, `Qwen3Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from specctl.formats.fields import Fields

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
    }
)

EXPERT_FIELDS = (
    "ep_size",
    "first_k_dense_replace",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
)
"""How DeepSeek's config, and those made after it, describe experts."""

_COMMON: Mapping[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama": {
            **_COMMON,
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
        "mistral": {
            **_COMMON,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "qwen2": {
            **_COMMON,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        "qwen3": {
            **_COMMON,
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    }
)

_DIMENSIONS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    }
)


def read_family(fields: Fields, *, absent_model_type: Family) -> Family | None:
    """Return the family of a config's `model_type`; None, with SD203, when it is not supported."""
    model_type = fields.text("model_type") or absent_model_type
    for family in ARCHITECTURES.values():
        if family == model_type:
            return family
    fields.findings.add(
        "SD203",
        where=fields.where("model_type"),
        message=f"layers of type `{model_type}` are not supported",
        expected=", ".join(CLASS_DEFAULTS),
        found=model_type,
    )
    return None


def family_of(fields: Fields, *, absent_model_type: Family) -> Family | None:
    """Return the family of a config's `model_type`, None without a word for another type.

    For readers of layers that need no `Decoder`.
    """
    model_type = fields.text("model_type") or absent_model_type
    return next((family for family in ARCHITECTURES.values() if family == model_type), None)


def with_class_defaults(fields: Fields, *, absent_model_type: Family) -> Fields:
    """Return a flat config object with the defaults of its class, as it is for another type."""
    family = family_of(fields, absent_model_type=absent_model_type)
    if family is None:
        return fields
    return fields.with_defaults(flat_defaults(family), defaults_rule(family))


def defaults_rule(family: Family) -> str:
    """Return the name under which a class default is recorded."""
    return f"default of transformers {family.capitalize()}Config"


def flat_defaults(family: Family) -> Mapping[str, object]:
    """Return the defaults that may stand in for a key absent from a flat config."""
    return {key: value for key, value in CLASS_DEFAULTS[family].items() if key not in _DIMENSIONS}


def flat_layers(root: Fields, *, absent_model_type: Family) -> tuple[Fields, Family | None]:
    """Return a flat config's root with the defaults of its class, and the family.

    The family is None, with SD203, for a `model_type` that is not supported.
    """
    family = read_family(root, absent_model_type=absent_model_type)
    if family is None:
        return root, None
    return root.with_defaults(flat_defaults(family), defaults_rule(family)), family
