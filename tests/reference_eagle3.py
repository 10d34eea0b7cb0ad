"""EAGLE-3 written straight from its description: whole sequences, dense attention, no cache.

Shares no code with `runtime`; reads the stored tensors by their Speculators names. Differentiable,
so that tiny drafts can be trained with it.
Entry i = (token x[i+1], state g[i]), position i. Layer 0: e = input_layernorm(E[x]), u =
hidden_norm(g), q/k/v from (e, u), residual g (or u with norm_before_residual); logits =
head(norm(r)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOutput:
    """Stream before the last norm, the same normed, and logits over draft ids."""

    raw: torch.Tensor
    normed: torch.Tensor
    logits: torch.Tensor

    def feedback(self, config: Mapping[str, Any]) -> torch.Tensor:
        return self.normed if config["norm_output"] else self.raw


def fuse(tensors: Tensors, config: Mapping[str, Any], aux: torch.Tensor) -> torch.Tensor:
    """Return g [n, H] of the target states side by side [n, A * H_t]."""
    eps = config["transformer_layer_config"]["rms_norm_eps"]
    if config["norm_before_fc"]:
        aux = norm(aux, tensors["input_norm.weight"], eps)
    if config["fc_norm"]:
        states = aux.split(config["target_hidden_size"], dim=1)
        aux = torch.cat(
            [norm(state, tensors[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(states)],
            dim=1,
        )
    return aux @ tensors["fc.weight"].T + tensors.get("fc.bias", torch.zeros(()))


def run(
    tensors: Tensors,
    config: Mapping[str, Any],
    *,
    embedding: torch.Tensor,
    ids: torch.Tensor,
    states: torch.Tensor,
) -> ReferenceOutput:
    """Run entries 0..n-1.

    Args:
        embedding: [V, H] over target ids.
        ids: [n], the token of each entry.
        states: [n, H], `fuse` of the target or the feedback of the entry before.
    """
    layer = config["transformer_layer_config"]
    eps = layer["rms_norm_eps"]
    embedded = norm(embedding[ids], tensors["layers.0.input_layernorm.weight"], eps)
    normed = norm(states, tensors["layers.0.hidden_norm.weight"], eps)
    stream = normed if config["norm_before_residual"] else states
    for index in range(layer["num_hidden_layers"]):
        prefix = f"layers.{index}."
        source = (
            torch.cat((embedded, normed), dim=1)
            if index == 0
            else norm(stream, tensors[prefix + "input_layernorm.weight"], eps)
        )
        stream = stream + _attend(tensors, prefix + "self_attn.", layer, source)
        inner = norm(stream, tensors[prefix + "post_attention_layernorm.weight"], eps)
        gate = _project(tensors, prefix + "mlp.gate_proj", inner)
        up = _project(tensors, prefix + "mlp.up_proj", inner)
        stream = stream + _project(tensors, prefix + "mlp.down_proj", silu(gate) * up)
    last = norm(stream, tensors["norm.weight"], eps)
    return ReferenceOutput(raw=stream, normed=last, logits=last @ tensors["lm_head.weight"].T)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _project(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(()))


def _attend(
    tensors: Tensors, prefix: str, layer: Mapping[str, Any], source: torch.Tensor
) -> torch.Tensor:
    length, head_dim = source.shape[0], layer["head_dim"]
    groups = layer["num_attention_heads"] // layer["num_key_value_heads"]
    q, k, v = (
        _project(tensors, f"{prefix}{name}_proj", source).view(length, -1, head_dim)
        for name in "qkv"
    )
    if f"{prefix}q_norm.weight" in tensors:
        q = norm(q, tensors[f"{prefix}q_norm.weight"], layer["rms_norm_eps"])
        k = norm(k, tensors[f"{prefix}k_norm.weight"], layer["rms_norm_eps"])
    q, k = _rotate(q, layer), _rotate(k, layer)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(length, -1)
    return _project(tensors, f"{prefix}o_proj", mixed)


def _rotate(x: torch.Tensor, layer: Mapping[str, Any]) -> torch.Tensor:
    theta, half = layer["rope_parameters"]["rope_theta"], x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
