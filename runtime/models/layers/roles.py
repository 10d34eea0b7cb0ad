"""Which tensors a model is made of: role -> shape, from the manifest's facts alone.

The roles and their symbolic shapes are `specctl.contract.roles`; here the symbols get numbers. One
table serves the check at load (missing, wrong shape, left over) and the builders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specctl.contract.manifest import Decoder, Draft, LocalConvolution, Target, Vocabulary
from specctl.contract.roles import (
    EAGLE1_ROLES,
    EAGLE3_ROLES,
    ROLES_BY_ALGORITHM,
    TARGET_ROLES,
    TensorRole,
    dimension,
    find_role,
    required_roles,
    roles_of_draft,
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
    assert draft.aux_layer_ids is not None, f"a manifest of {draft.algorithm} lists its aux layers"
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


def peagle_shapes(draft: Draft) -> Shapes:
    """Return role -> shape of an EAGLE-3 draft and of `mask_hidden`, at its stored rank."""
    assert draft.aux_layer_ids is not None, "a manifest of peagle lists its aux layers"
    wide = len(draft.aux_layer_ids) * draft.target_hidden_size
    stored = draft.tensors.get("mask_hidden")
    is_flat = stored is not None and len(stored.shape) == 2
    return {"mask_hidden": (1, wide) if is_flat else (1, 1, wide)} | eagle3_shapes(draft)


def eagle1_shapes(draft: Draft) -> Shapes:
    """Return role -> shape of fc, norms and layers; embedding and head are not among them.

    The norms that EAGLE-1 may lack are wanted where the manifest has a tensor for them.
    """
    decoder = draft.decoder
    names = required_roles(
        EAGLE1_ROLES,
        conditions=frozenset(
            _layer_conditions(decoder) | ({"fc_bias"} if draft.has_fc_bias else set())
        ),
        num_layers=decoder.num_layers,
        num_aux_states=0,
    )
    input_norms = tuple(f"layers.{index}.input_norm" for index in range(decoder.num_layers))
    first = tuple(
        name for name in ("embedding_norm", input_norms[0], "norm") if name in draft.tensors
    )
    sizes = _layer_sizes(decoder) | {"Ht": draft.target_hidden_size, "X": decoder.hidden_size}
    return {name: _shape(name, EAGLE1_ROLES, sizes) for name in (*names, *first, *input_norms[1:])}


def mtp_shapes(draft: Draft) -> Shapes:
    """Return role -> shape of the prediction layers; embedding, head and map are not among them."""
    decoder = draft.decoder
    roles = roles_of_draft("mtp", decoder.num_layers)
    names = required_roles(
        roles,
        conditions=frozenset(_layer_conditions(decoder)),
        num_layers=decoder.num_layers,
        num_aux_states=0,
    )
    sizes = _layer_sizes(decoder) | {"Ht": draft.target_hidden_size, "X": decoder.hidden_size}
    return {name: _shape(name, roles, sizes) for name in names}


def block_shapes(draft: Draft, *, vocabulary: Vocabulary) -> Shapes:
    """Return role -> shape of a block draft; embedding, head and map are not among them.

    `markov_w2` may hold a row for each target id although the draft's vocabulary is reduced.
    """
    assert draft.aux_layer_ids is not None, "the manifest of a block draft lists its aux layers"
    decoder, markov = draft.decoder, draft.markov
    rank = 0 if markov is None else markov.rank
    conditions = _layer_conditions(decoder)
    conditions |= set() if markov is None else {"markov", f"markov_{markov.kind}"}
    conditions |= {"confidence"} if draft.has_confidence_head else set()
    roles = ROLES_BY_ALGORITHM[draft.algorithm]
    names = required_roles(
        roles,
        conditions=frozenset(conditions),
        num_layers=decoder.num_layers,
        num_aux_states=len(draft.aux_layer_ids),
    )
    taps = None if draft.block is None else draft.block.convolution
    choice = None if draft.block is None else draft.block.selector
    w2 = draft.tensors.get("markov_w2")
    is_full = w2 is not None and w2.shape[:1] == (vocabulary.target_vocab_size,)
    sizes = _layer_sizes(decoder) | {
        "A": len(draft.aux_layer_ids),
        "Ht": draft.target_hidden_size,
        "X": decoder.hidden_size,
        "V": vocabulary.target_vocab_size,
        "R": vocabulary.target_vocab_size if is_full else vocabulary.draft_vocab_size,
        "M": rank if choice is None else choice.rank,
        **({} if taps is None else _convolution_sizes(decoder, taps)),
        "C": decoder.hidden_size + (rank if draft.is_confidence_with_markov else 0),
    }
    return {name: _shape(name, roles, sizes) for name in names}


def _convolution_sizes(decoder: Decoder, taps: LocalConvolution) -> dict[str, int]:
    return {"K": taps.kernel_size, "CG": decoder.hidden_size // taps.group_size}


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
