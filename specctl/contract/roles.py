"""Canonical tensor roles: what each tensor of a target or draft is, its shape, and when it exists.

One table serves the readers (what is missing), the checks (which shape) and the docs. Roles carry
no dialect: the names in files are in `specctl.formats`.
Shapes are sums and products of `SHAPE_SYMBOLS`; `dimension` evaluates them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class TensorRole(msgspec.Struct, frozen=True, kw_only=True):
    """One role.

    Args:
        name: canonical role; `{i}` is a layer index or the index of a captured state.
        shape: as stored, [out, in] for linears, in `SHAPE_SYMBOLS`.
        when: `always`, `optional`, or the word of `required_roles`' conditions that requires it.
    """

    name: str
    shape: tuple[str, ...]
    when: str


SHAPE_SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "H": "hidden size",
        "Ht": "target hidden size",
        "A": "captured states",
        "Q": "query rows: heads times head dim",
        "KV": "key/value rows",
        "P": "head dim",
        "X": "attention input: H, or 2H in EAGLE-3's first layer",
        "I": "intermediate size",
        "V": "target vocabulary",
        "R": "draft vocabulary",
        "M": "rank of a Markov head or of a candidate selector",
        "C": "confidence input: H, or H + M",
        "K": "taps of a local convolution",
        "CG": "groups of channels of a local convolution",
    }
)
ALWAYS = "always"
OPTIONAL = "optional"


def _role(name: str, *shape: str, when: str = ALWAYS) -> TensorRole:
    return TensorRole(name=name, shape=shape, when=when)


def relaxed(roles: tuple[TensorRole, ...], *names: str) -> tuple[TensorRole, ...]:
    """Return the table with the named roles optional."""
    return tuple(
        TensorRole(name=role.name, shape=role.shape, when=OPTIONAL) if role.name in names else role
        for role in roles
    )


LAYER_ROLES: tuple[TensorRole, ...] = (
    _role("layers.{i}.q_proj.weight", "Q", "X"),
    _role("layers.{i}.k_proj.weight", "KV", "X"),
    _role("layers.{i}.v_proj.weight", "KV", "X"),
    _role("layers.{i}.o_proj.weight", "H", "Q"),
    _role("layers.{i}.q_proj.bias", "Q", when="qkv_bias"),
    _role("layers.{i}.k_proj.bias", "KV", when="qkv_bias"),
    _role("layers.{i}.v_proj.bias", "KV", when="qkv_bias"),
    _role("layers.{i}.o_proj.bias", "H", when="o_bias"),
    _role("layers.{i}.q_norm", "P", when="qk_norm"),
    _role("layers.{i}.k_norm", "P", when="qk_norm"),
    _role("layers.{i}.gate_proj.weight", "I", "H"),
    _role("layers.{i}.up_proj.weight", "I", "H"),
    _role("layers.{i}.down_proj.weight", "H", "I"),
    _role("layers.{i}.gate_proj.bias", "I", when="mlp_bias"),
    _role("layers.{i}.up_proj.bias", "I", when="mlp_bias"),
    _role("layers.{i}.down_proj.bias", "H", when="mlp_bias"),
    _role("layers.{i}.input_norm", "H"),
    _role("layers.{i}.post_attention_norm", "H"),
)

TARGET_ROLES: tuple[TensorRole, ...] = (
    _role("embedding", "V", "H"),
    *LAYER_ROLES,
    _role("norm", "H"),
    _role("head", "V", "H", when="untied_head"),
)

_DRAFT_VOCABULARY: tuple[TensorRole, ...] = (
    _role("embedding", "V", "H", when=OPTIONAL),
    _role("head", "R", "H", when=OPTIONAL),
    _role("d2t", "R", when=OPTIONAL),
    _role("t2d", "V", when=OPTIONAL),
)

EAGLE3_ROLES: tuple[TensorRole, ...] = (
    *_DRAFT_VOCABULARY,
    _role("fc.weight", "H", "A*Ht"),
    _role("fc.bias", "H", when="fc_bias"),
    _role("input_norm", "A*Ht", when="norm_before_fc"),
    _role("fc_norm.{i}", "Ht", when="fc_norm"),
    _role("layers.0.hidden_norm", "H"),
    *LAYER_ROLES,
    _role("norm", "H"),
)

PEAGLE_ROLES: tuple[TensorRole, ...] = (_role("mask_hidden", "1", "1", "A*Ht"), *EAGLE3_ROLES)
"""Native files store `mask_hidden` as [1, A*Ht]."""

BLOCK_ROLES: tuple[TensorRole, ...] = (
    *_DRAFT_VOCABULARY,
    _role("fc.weight", "H", "A*Ht"),
    _role("hidden_norm", "H"),
    *LAYER_ROLES,
    _role("norm", "H"),
)
"""The backbone that block drafts share, and all of a plain DFlash draft."""

DSPARK_ROLES: tuple[TensorRole, ...] = (
    *BLOCK_ROLES,
    _role("markov_w1", "V", "M", when="markov"),
    _role("markov_w2", "R", "M", when="markov"),
    _role("markov_gate.weight", "M", "H+M", when="markov_gated"),
    _role("markov_gate.bias", "M", when="markov_gated"),
    _role("markov_joint.weight", "3*M", "H+2*M", when="markov_rnn"),
    _role("markov_joint.bias", "3*M", when="markov_rnn"),
    _role("confidence.weight", "1", "C", when="confidence"),
    _role("confidence.bias", "1", when="confidence"),
)

# The first layer of EAGLE-1 has no input norm unless the draft was trained with `layernorms`.
EAGLE1_ROLES: tuple[TensorRole, ...] = (
    _role("embedding", "V", "H", when=OPTIONAL),
    _role("head", "V", "H", when=OPTIONAL),
    _role("fc.weight", "H", "H+Ht"),
    _role("fc.bias", "H", when="fc_bias"),
    _role("embedding_norm", "H", when="layernorms"),
    _role("layers.0.input_norm", "H", when="layernorms"),
    *relaxed(LAYER_ROLES, "layers.{i}.input_norm"),
    _role("norm", "H", when="layernorms"),
)

DFLASH2_HEADS: tuple[TensorRole, ...] = (
    *(
        role
        for name in ("attention_conv", "mlp_conv")
        for role in (
            _role(f"layers.{{i}}.{name}.base_kernel", "2", "K", "H"),
            _role(f"layers.{{i}}.{name}.kernel_projection", "2*K*CG", "H"),
        )
    ),
    _role("selector.hidden_projection", "M", "H"),
    _role("selector.predecessor", "V", "M"),
    _role("selector.successor", "V", "M"),
)
"""Local convolutions around every sub-layer, and the candidate selector."""

DFLASH2_ROLES: tuple[TensorRole, ...] = (*BLOCK_ROLES, *DFLASH2_HEADS)

MTP_ROLES: tuple[TensorRole, ...] = (
    _role("embedding", "V", "H", when=OPTIONAL),
    _role("head", "V", "H", when=OPTIONAL),
    _role("fc.weight", "H", "H+Ht"),
    _role("embedding_norm", "H"),
    _role("hidden_norm", "Ht"),
    *LAYER_ROLES,
    _role("norm", "H"),
)

_AROUND_LAYER = ("fc.weight", "embedding_norm", "hidden_norm", "norm")
MTP_LAYERS_ROLES: tuple[TensorRole, ...] = tuple(
    TensorRole(name=f"layers.{{i}}.{role.name}", shape=role.shape, when=role.when)
    if role.name in _AROUND_LAYER
    else role
    for role in MTP_ROLES
)
"""Several prediction layers, each with what joins its inputs and its own last norm."""

MAP_ROLES = ("d2t", "t2d", "token_map")
"""Integer vectors that say which target ids a reduced vocabulary holds."""

ROLES_BY_ALGORITHM: Mapping[str, tuple[TensorRole, ...]] = {
    "eagle3": EAGLE3_ROLES,
    "dspark": DSPARK_ROLES,
    "mtp": MTP_ROLES,
    "eagle": EAGLE1_ROLES,
    "dflash": BLOCK_ROLES,
    "dflash2": DFLASH2_ROLES,
    "peagle": PEAGLE_ROLES,
}


def roles_of_draft(algorithm: str, num_layers: int) -> tuple[TensorRole, ...]:
    """Return the table of a draft that a manifest can describe; empty for another algorithm."""
    if algorithm == "mtp" and num_layers > 1:
        return MTP_LAYERS_ROLES
    return ROLES_BY_ALGORITHM.get(algorithm, ())


_INDEX = re.compile(r"^(layers|fc_norm)\.(\d+)(?=\.|$)")


def generic_role(role: str) -> tuple[str, int | None]:
    """Return the role with its index as `{i}`, and the index: `fc_norm.2` -> (`fc_norm.{i}`, 2)."""
    found = _INDEX.match(role)
    if found is None:
        return role, None
    return f"{found[1]}.{{i}}{role[found.end() :]}", int(found[2])


def find_role(role: str, roles: tuple[TensorRole, ...]) -> TensorRole | None:
    """Return the table entry of a role, preferring an entry that names the index itself."""
    generic, _ = generic_role(role)
    by_name = {entry.name: entry for entry in roles}
    return by_name.get(role) or by_name.get(generic)


def required_roles(
    roles: tuple[TensorRole, ...],
    *,
    conditions: frozenset[str],
    num_layers: int,
    num_aux_states: int,
) -> tuple[str, ...]:
    """Return the roles that a complete file holds, in table order.

    Args:
        roles: one table of this module.
        conditions: the `when` words that hold; `always` is implied, `optional` never holds.
        num_layers: layers that `layers.{i}` runs over.
        num_aux_states: captured states that `fc_norm.{i}` runs over.
    """
    names: list[str] = []
    for entry in roles:
        if entry.when != ALWAYS and entry.when not in conditions:
            continue
        if "{i}" not in entry.name:
            names.append(entry.name)
            continue
        count = num_layers if entry.name.startswith("layers.") else num_aux_states
        names.extend(entry.name.replace("{i}", str(index)) for index in range(count))
    return tuple(names)


def dimension(symbol: str, sizes: Mapping[str, int]) -> int | None:
    """Return the size of one shape symbol, None when a size it needs is unknown.

    Args:
        symbol: a number, a key of `sizes`, or a sum of products of them (`H+2*M`).
        sizes: single symbols -> elements.
    """
    total = 0
    for term in symbol.split("+"):
        product = 1
        for factor in term.split("*"):
            size = int(factor) if factor.isdigit() else sizes.get(factor)
            if size is None:
                return None
            product *= size
        total += product
    return total
