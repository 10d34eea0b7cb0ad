"""What kind of layer the tensors make, and which tensors such a layer must have.

Invariants: the kind is read off roles and shapes, never off a model's name. A quantised weight
counts as stored when any tensor of its stem is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from specctl.contract.manifest import TensorRef

Attention = Literal["grouped-query", "latent", "fused", "other", "none"]
Mlp = Literal["dense", "fused dense", "experts", "fused experts", "other", "none"]

_EXPERT = re.compile(
    r"layers\.(\d{1,5})\.mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj\.(?:weight|qweight|weight_packed)"
)
_ATTENTION = re.compile(r"(?:self_attn|attn|attention|linear_attn|mixer|[qkvo]_proj)\.")
_MLP = re.compile(r"(?:mlp|ffn|moe|mixer|feed_forward|block_sparse_moe|share_expert|up_proj)\.")
_LATENT = ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight")
_FUSED = ("self_attn.qkv_proj.weight", "attention.query_key_value.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStyle:
    """Kind of the layers.

    Args:
        attention: which projections there are.
        mlp: dense, or how the experts are stored.
        num_experts: of layer 0, 0 for a dense one.
        has_output_gate: q_proj has twice the rows that o_proj reads.
        has_indexer: sparse attention with an indexer of its own.
    """

    attention: Attention
    mlp: Mlp
    num_experts: int
    has_output_gate: bool
    has_indexer: bool

    @property
    def is_plain(self) -> bool:
        """Tell whether this is a dense layer of the llama family."""
        return (self.attention, self.mlp, self.has_output_gate) == ("grouped-query", "dense", False)


def read_style(tensors: Mapping[str, TensorRef]) -> LayerStyle:
    """Return the kind of layer 0."""
    first = {
        role.removeprefix("layers.0."): ref
        for role, ref in tensors.items()
        if role.startswith("layers.0.")
    }
    return LayerStyle(
        attention=_attention(first),
        mlp=_mlp(first),
        num_experts=_num_experts(first, tensors),
        has_output_gate=_has_output_gate(first),
        has_indexer=any(".indexer." in f".{name}" for name in first),
    )


def _attention(first: Mapping[str, TensorRef]) -> Attention:
    if any(name in first for name in _LATENT):
        return "latent"
    if any(name in first for name in _FUSED):
        return "fused"
    if any(has_stem(first, f"{name}_proj") for name in "qk"):
        return "grouped-query"  # one of them alone is a layer that lost the others
    return "other" if any(_ATTENTION.match(name) for name in first) else "none"


def _mlp(first: Mapping[str, TensorRef]) -> Mlp:
    if any(name.startswith("mlp.experts.gate_up_proj") for name in first):
        return "fused experts"
    if any(name.startswith("mlp.experts.") for name in first):
        return "experts"
    if has_stem(first, "mlp.gate_up_proj"):
        return "fused dense"
    if has_stem(first, "gate_proj") or has_stem(first, "down_proj"):
        return "dense"
    return "other" if any(_MLP.match(name) for name in first) else "none"


def _num_experts(first: Mapping[str, TensorRef], tensors: Mapping[str, TensorRef]) -> int:
    fused = first.get("mlp.experts.gate_up_proj")
    if fused is not None:
        return fused.shape[0] if fused.shape else 0
    return len(expert_indexes(tensors).get((0, "down"), ()))


def _has_output_gate(first: Mapping[str, TensorRef]) -> bool:
    query, out = first.get("q_proj.weight"), first.get("o_proj.weight")
    if query is None or out is None or not query.shape or len(out.shape) != 2:
        return False
    return out.shape[1] > 0 and query.shape[0] == 2 * out.shape[1]


def has_stem(roles: Iterable[str], stem: str) -> bool:
    """Tell whether a weight is stored in any form: `q_proj.weight`, `q_proj.qweight`, bare."""
    return any(role == stem or role.startswith(stem + ".") for role in roles)


def expert_indexes(tensors: Iterable[str]) -> Mapping[tuple[int, str], tuple[int, ...]]:
    """Return (layer, projection) -> experts that store its weight, ascending."""
    found: dict[tuple[int, str], set[int]] = {}
    for role in tensors:
        match = _EXPERT.fullmatch(role)
        if match is not None:
            found.setdefault((int(match[1]), match[3]), set()).add(int(match[2]))
    return {key: tuple(sorted(value)) for key, value in found.items()}


def required_stems(style: LayerStyle) -> tuple[str, ...]:
    """Return the stems that a layer of this kind must have, experts apart.

    A layer without any attention is one whose attention was lost, not one of another kind.
    """
    attention = {
        "grouped-query": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "latent": ("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "o_proj"),
        "fused": (),
        "other": (),
        "none": ("q_proj", "k_proj", "v_proj", "o_proj"),
    }[style.attention]
    mlp = {
        "dense": ("gate_proj", "up_proj", "down_proj"),
        "fused dense": ("mlp.gate_up_proj", "down_proj"),
        "experts": ("mlp.gate",),
        "fused experts": ("mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        "other": (),
        "none": ("gate_proj", "up_proj", "down_proj"),
    }[style.mlp]
    return (*attention, *mlp)
