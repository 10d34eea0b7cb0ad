"""What writers share: the layer keys of a config, the tensors by name, the vocabulary map.

Invariants: a config says every fact once, in the spelling that all readers know; rope is the
exception, which transformers 4 and 5 spell differently, so that both spellings are written with
equal values. Tensors come from the files as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from specctl.checkpoint import WEIGHT_DTYPES
from specctl.checkpoint.config_sections import named_architectures
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Decoder, Rope, TensorRef
from specctl.contract.vocabulary_map import absolute_to_offsets, pack_int64, target_mask
from specctl.draft import DraftCheckpoint
from specctl.formats.names import NameTable
from specctl.formats.written import (
    Copy,
    Rows,
    Span,
    TensorSource,
    Values,
    WriteRequest,
    unable,
)

SPECULATORS_VERSION = "0.9.0"
"""Version of the library whose classes the Speculators writers fill."""
VOCABULARY_ROLES = ("d2t", "t2d")
SHARED_KEYS: Mapping[str, str] = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
"""Roles that may be the target's -> key under which a file with all of its own stores them."""
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
    # No field of qwen2, whose biases are always there; elsewhere it means biases in o as well.
    if decoder.family == "qwen2" or decoder.has_qkv_bias != decoder.has_o_bias:
        del config["attention_bias"]
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
    if ids and not (min(ids) >= 0 and max(ids) < size):
        return {}  # SD402 stops the conversion
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


def speculators_section(
    request: WriteRequest, *, algorithm: str, num_tokens: int
) -> dict[str, Any]:
    """Return `speculators_config`: one greedy proposal method and the target."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": num_tokens,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {
            "architectures": _target_architectures(request),
            "name_or_path": request.target_name,
        },
    }


def _target_architectures(request: WriteRequest) -> list[str]:
    if request.target is not None and request.target.architecture:
        return [request.target.architecture]
    return named_architectures(request.draft.config)


def speculators_problems(request: WriteRequest) -> list[Diagnostic]:
    """Return SD602 for what every Speculators config must say and the draft leaves open."""
    problems: list[Diagnostic] = []
    if request.draft.geometry is None:
        problems.append(
            unable(
                where=CONFIG,
                message="a Speculators config states the number of draft tokens, which is open",
                expected="--num-speculative-tokens N",
                found="nothing",
            )
        )
    if request.target_name is None:
        problem = unable(
            where=CONFIG,
            message="a Speculators config names the target, which is not known here",
            expected="--target TARGET or --target-name NAME",
            found="nothing",
        )
        problems.append(_softened(request, problem))
    return problems


def _softened(request: WriteRequest, problem: Diagnostic) -> Diagnostic:
    """Return a problem, as an info where the source of the same dialect has it already."""
    if request.is_same_dialect:
        return msgspec.structs.replace(problem, severity="info")
    return problem


def own_or_target(request: WriteRequest, role: str) -> TensorSource | Diagnostic:
    """Return the draft's embedding or head, else the target's cut to the draft's vocabulary.

    Args:
        request: the draft and, where the draft has no tensor of its own, the target.
        role: `embedding` or `head`.

    Returns:
        The tensor, or SD602 when there is none that fits; an info when the source is of the same
        dialect and leaves it out.
    """
    draft, target = request.draft, request.target
    if role in draft.tensors:
        return Copy(ref=draft.tensors[role])
    ref = None if target is None else target.embedding if role == "embedding" else target.head
    if ref is None or request.is_same_dialect:
        problem = unable(
            where=CONFIG,
            message=f"the dialect stores the {role}, and the draft takes the target's",
            expected="--target TARGET",
            found=f"no {role}",
        )
        return _softened(request, problem)
    if ref.dtype not in WEIGHT_DTYPES:
        return unable(
            where=f"target {ref.file}::{ref.key}",
            message=f"the target's {role} is quantised, and its scales would stay behind",
            expected=" or ".join(WEIGHT_DTYPES),
            found=ref.dtype,
        )
    size, width = draft.target_vocab_size, draft.hidden_size
    if size is None or len(ref.shape) != 2 or ref.shape[0] < size or ref.shape[1] != width:
        return unable(
            where=f"target {ref.file}::{ref.key}",
            message=f"the target's {role} does not have the draft's shape",
            expected=f"at least {size} rows of {width}",
            found=" x ".join(map(str, ref.shape)),
        )
    return _cut(ref, draft if role == "head" else None, size)


def _cut(ref: TensorRef, draft: DraftCheckpoint | None, size: int) -> TensorSource:
    """Return the target's matrix: the rows of a reduced map, or the first `size`."""
    if draft is not None and draft.map_kind == "reduced" and draft.draft_to_target is not None:
        return Rows(ref=ref, rows=draft.draft_to_target, origin="target")
    if ref.shape[0] == size:
        return Copy(ref=ref, origin="target")
    return Span(ref=ref, begin_bytes=0, shape=(size, *ref.shape[1:]), origin="target")


def add_shared(
    request: WriteRequest, tensors: dict[str, TensorSource], *roles: str
) -> Iterator[Diagnostic]:
    """Add embedding or head to the tensors; yield SD602 for one that is nowhere.

    Args:
        request: as for `own_or_target`.
        tensors: receives them under `SHARED_KEYS`.
        roles: those that the dialect stores.
    """
    for role in roles:
        found = own_or_target(request, role)
        if isinstance(found, Diagnostic):
            yield found
        else:
            tensors[SHARED_KEYS[role]] = found


def target_layers(request: WriteRequest) -> int | None:
    """Return the target's layer count, from the target or from the draft's own note of it."""
    if request.target is not None and request.target.num_layers is not None:
        return request.target.num_layers
    return request.draft.target_num_layers
