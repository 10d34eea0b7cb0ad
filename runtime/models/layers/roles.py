"""Which tensors a model is made of: role -> shape, from the manifest's facts alone.

The roles and their symbolic shapes are `specctl.contract.roles`; here the symbols get numbers. One
table serves the check at load (missing, wrong shape, left over) and the builders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specctl.contract.manifest import Decoder, Draft, Target
from specctl.contract.roles import (
    EAGLE3_ROLES,
    MTP_ROLES,
    TARGET_ROLES,
    TensorRole,
    dimension,
    find_role,
    required_roles,
)

TensorSource = Callable[[str], torch.Tensor]
"""Role -> tensor, already in the model's dtype and on its device."""

Shapes = dict[str, tuple[int, ...]]


def layer_source(take: TensorSource, layer_index: int) -> TensorSource:
    """Return a source that knows the roles of one layer without their prefix."""
    return lambda role: take(f"layers.{layer_index}.{role}")


def target_shapes(target: Target) -> Shapes:
    """Return role -> shape of every tensor that the model is built from; no `head` when tied."""
    decoder = target.decoder
    conditions = _layer_conditions(decoder)
    if not target.is_head_tied:
        conditions.add("untied_head")
    names = required_roles(
        TARGET_ROLES,
        conditions=frozenset(conditions),
        num_layers=decoder.num_layers,
        num_aux_states=0,
    )
    sizes = _layer_sizes(decoder) | {"V": target.vocab_size, "X": decoder.hidden_size}
    return {name: _shape(name, TARGET_ROLES, sizes) for name in names}


def eagle3_shapes(draft: Draft) -> Shapes:
    """Return role -> shape of fc, norms and layers; embedding, head and map are not among them."""
    assert draft.aux_layer_ids is not None, "an eagle3 manifest lists its aux layers"
    decoder, num_states = draft.decoder, len(draft.aux_layer_ids)
    flags = {
        "fc_bias": draft.has_fc_bias,
        "norm_before_fc": draft.has_norm_before_fc,
        "fc_norm": draft.has_fc_norm,
    }
    conditions = _layer_conditions(decoder) | {name for name, holds in flags.items() if holds}
    names = required_roles(
        EAGLE3_ROLES,
        conditions=frozenset(conditions),
        num_layers=decoder.num_layers,
        num_aux_states=num_states,
    )
    hidden = decoder.hidden_size
    sizes = _layer_sizes(decoder) | {"A": num_states, "Ht": draft.target_hidden_size}
    first, other = sizes | {"X": 2 * hidden}, sizes | {"X": hidden}
    return {
        name: _shape(name, EAGLE3_ROLES, first if name.startswith("layers.0.") else other)
        for name in names
    }


def mtp_shapes(draft: Draft) -> Shapes:
    """Return role -> shape of the prediction layers; embedding, head and map are not among them."""
    decoder = draft.decoder
    names = required_roles(
        MTP_ROLES,
        conditions=frozenset(_layer_conditions(decoder)),
        num_layers=decoder.num_layers,
        num_aux_states=0,
    )
    sizes = _layer_sizes(decoder) | {"Ht": draft.target_hidden_size, "X": decoder.hidden_size}
    return {name: _shape(name, MTP_ROLES, sizes) for name in names}


def _layer_conditions(decoder: Decoder) -> set[str]:
    flags = {
        "qkv_bias": decoder.has_qkv_bias,
        "o_bias": decoder.has_o_bias,
        "mlp_bias": decoder.has_mlp_bias,
        "qk_norm": decoder.has_qk_norm,
    }
    return {name for name, holds in flags.items() if holds}


def _layer_sizes(decoder: Decoder) -> dict[str, int]:
    return {
        "H": decoder.hidden_size,
        "I": decoder.intermediate_size,
        "P": decoder.head_dim,
        "Q": decoder.num_attention_heads * decoder.head_dim,
        "KV": decoder.num_kv_heads * decoder.head_dim,
    }


def _shape(role: str, roles: tuple[TensorRole, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    entry = find_role(role, roles)
    assert entry is not None, f"role {role} is not in its own table"
    shape = tuple(dimension(symbol, sizes) for symbol in entry.shape)
    assert None not in shape, f"role {role} has a size without a number: {entry.shape}"
    return tuple(size for size in shape if size is not None)
