"""What writers share: the layer keys of a config, the tensors by name, the vocabulary map.

Invariants: a config says every fact once, in the spelling that all readers know; rope is the
exception, which transformers 4 and 5 spell differently, so that both spellings are written with
equal values. Tensors come from the files as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specctl.contract.manifest import Decoder, Rope
from specctl.contract.vocabulary_map import absolute_to_offsets, pack_int64, target_mask
from specctl.draft import DraftCheckpoint
from specctl.formats.names import NameTable
from specctl.formats.written import Copy, TensorSource, Values

VOCABULARY_ROLES = ("d2t", "t2d")
DTYPE_NAMES: Mapping[str, str] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}


def layer_config(draft: DraftCheckpoint, decoder: Decoder) -> dict[str, Any]:
    """Return the Hugging Face keys that describe the draft's layers, sorted, without a tie.

    `vocab_size` is the target's, `num_hidden_layers` the number of layers stored.
    """
    config: dict[str, Any] = {
        "attention_bias": decoder.has_qkv_bias,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.hidden_act,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "max_position_embeddings": decoder.max_position_embeddings,
        "mlp_bias": decoder.has_mlp_bias,
        "model_type": decoder.family,
        "num_attention_heads": decoder.num_attention_heads,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "rms_norm_eps": decoder.rms_norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": draft.target_vocab_size,
        **rope_config(decoder.rope),
        **_window_config(decoder),
        **_id_config(draft),
    }
    if decoder.family == "qwen2":
        del config["attention_bias"]  # no field of that class; its biases are always there
    return dict(sorted(config.items()))


def rope_config(rope: Rope) -> dict[str, Any]:
    """Return both spellings of the rotary facts, with equal values."""
    theta = int(rope.theta) if rope.theta.is_integer() and rope.theta < 1e15 else rope.theta
    numbers = {"rope_type": rope.kind, **dict(rope.parameters)}
    config: dict[str, Any] = {
        "rope_parameters": {"rope_theta": theta, **numbers},
        "rope_theta": theta,
    }
    if rope.kind != "default":
        config["rope_scaling"] = numbers
    return config


def _window_config(decoder: Decoder) -> dict[str, Any]:
    if decoder.sliding_window is None:
        if decoder.family == "mistral":
            return {"sliding_window": None}
        return {"use_sliding_window": False} if decoder.family.startswith("qwen") else {}
    config: dict[str, Any] = {
        "layer_types": list(decoder.layer_types),
        "sliding_window": decoder.sliding_window,
    }
    if decoder.family.startswith("qwen"):
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    return config


def _id_config(draft: DraftCheckpoint) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if draft.bos_token_id is not None:
        config["bos_token_id"] = draft.bos_token_id
    if draft.eos_token_ids:
        ids = list(draft.eos_token_ids)
        config["eos_token_id"] = ids if ids[1:] else ids[0]
    return config


def dtype_config(draft: DraftCheckpoint) -> dict[str, Any]:
    """Return the `torch_dtype` key that both generations of transformers read."""
    name = DTYPE_NAMES.get(draft.dtype or "")
    return {} if name is None else {"torch_dtype": name}


def named_tensors(
    draft: DraftCheckpoint, names: NameTable, *, without: Collection[str] = VOCABULARY_ROLES
) -> dict[str, TensorSource]:
    """Return key -> stored tensor for every role that the table names.

    Args:
        draft: its tensors by role.
        names: table of the dialect that is written.
        without: roles that the caller writes itself.
    """
    found: dict[str, TensorSource] = {}
    for role, ref in draft.tensors.items():
        key = None if role in without else names.key_of(role)
        if key is not None:
            found[key] = Copy(ref=ref)
    return found


def map_tensors(draft: DraftCheckpoint, *, with_mask: bool = True) -> dict[str, TensorSource]:
    """Return `d2t` (I64 offsets) and `t2d` (BOOL mask) of a reduced vocabulary, else nothing.

    A stored tensor of that form is copied; another one is computed from the absolute map.
    """
    ids, size = draft.draft_to_target, draft.target_vocab_size
    if ids is None or size is None or draft.map_kind != "reduced":
        return {}
    offsets, mask = absolute_to_offsets(ids), target_mask(ids, size)
    stored = draft.tensors
    found: dict[str, TensorSource] = {}
    if "d2t" in stored and stored["d2t"].dtype == "I64" and draft.d2t == offsets:
        found["d2t"] = Copy(ref=stored["d2t"])
    else:
        found["d2t"] = Values(dtype="I64", out_shape=(len(ids),), data=pack_int64(offsets))
    if not with_mask:
        return found
    if "t2d" in stored and stored["t2d"].dtype == "BOOL" and draft.t2d == mask:
        found["t2d"] = Copy(ref=stored["t2d"])
    else:
        found["t2d"] = Values(dtype="BOOL", out_shape=(size,), data=mask)
    return found
