"""The config that describes a prediction layer, from one dialect to another.

A Speculators config nests the text model's fields; a target's config has them at its root, or in
`text_config` where it is multimodal.
*Source:* Speculators 0.9 `MTPConverter`, `mtp_model_classes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specctl.checkpoint.config_sections import named_architectures
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.fields import ReaderFindings, root_fields
from specctl.formats.mtp.config import text_fields
from specctl.formats.mtp.families import COUNT_FIELDS
from specctl.formats.writing import dtype_config, layer_config
from specctl.formats.written import unable

GATED_TEXT_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_TEXT_TYPE_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
_OUTER_TYPE_OF = {text: outer for outer, text in _TEXT_TYPE_OF.items()}
# Of the whole model, not of its layers.
_NOT_OF_A_LAYER = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


def speculators_layer(draft: DraftCheckpoint) -> dict[str, Any] | Diagnostic:
    """Return `transformer_layer_config`, or SD602 for a layer that the library has no class for."""
    section = draft.config.get("transformer_layer_config")
    if isinstance(section, Mapping):
        return dict(section)
    decoder = draft.decoder
    if decoder is not None:
        is_known = decoder.family == "qwen3" and decoder.has_qk_norm and not decoder.has_mlp_bias
        if is_known and decoder.has_qkv_bias == decoder.has_o_bias:
            return layer_config(draft, decoder)
        return _no_class(f"`{decoder.family}` layers")
    fields = dict(text_fields(root_fields(draft.config, ReaderFindings())).data)
    model_type = fields.get("model_type")
    known = _TEXT_TYPE_OF.get(model_type, model_type) if isinstance(model_type, str) else None
    if known not in GATED_TEXT_TYPES:
        return _no_class(f"layers of type `{model_type}`")
    kept = {key: value for key, value in fields.items() if key not in _dropped()}
    return {**kept, "model_type": known}


def qwen_config(draft: DraftCheckpoint) -> dict[str, Any] | Diagnostic:
    """Return the config of a slice in Qwen's layout, from a Speculators config."""
    section = draft.config.get("transformer_layer_config")
    layer = dict(section) if isinstance(section, Mapping) else {}
    model_type = layer.get("model_type")
    if model_type not in GATED_TEXT_TYPES:
        return unable(
            where=f"{CONFIG}#/transformer_layer_config/model_type",
            message=f"Qwen's layout holds gated layers, and this one is `{model_type}`",
            expected=", ".join(GATED_TEXT_TYPES),
            found=model_type,
        )
    head: dict[str, Any] = {
        "architectures": named_architectures(draft.config),
        **dtype_config(draft),
    }
    if model_type == "qwen3_next":
        return {**head, **layer, "num_nextn_predict_layers": 1}
    text = {**layer, "mtp_num_hidden_layers": 1}
    return {**head, "model_type": _OUTER_TYPE_OF[model_type], "text_config": text}


def deepseek_config(draft: DraftCheckpoint, depth: int) -> dict[str, Any] | Diagnostic:
    """Return the config of a slice in DeepSeek's layout behind a target of `depth` layers."""
    decoder = draft.decoder
    if decoder is None:
        return unable(
            where=f"{CONFIG}#/transformer_layer_config",
            message="only dense layers are renamed into DeepSeek's layout",
            expected="a dense layer of the llama family",
            found=draft.details.get("attention", "unknown"),
        )
    return {
        "architectures": [f"{decoder.family.capitalize()}ForCausalLMNextN"],
        **layer_config(draft, decoder),
        **dtype_config(draft),
        "num_hidden_layers": depth,
        "num_nextn_predict_layers": 1,
    }


def _dropped() -> frozenset[str]:
    return frozenset((*_NOT_OF_A_LAYER, *COUNT_FIELDS))


def _no_class(found: str) -> Diagnostic:
    return unable(
        where=CONFIG,
        message=f"Speculators mtp has no class for {found}",
        expected=", ".join(("qwen3", *GATED_TEXT_TYPES)),
        found=found,
    )
