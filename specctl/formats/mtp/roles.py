"""Role tables of prediction layers that the runtime does not compute: shapes where they are known.

The dense table is `contract.roles.MTP_ROLES`. Symbols beyond the contract's: `E` experts, `Ie` an
expert's inner size, `KVr` latent rank, `KVa` and `KVb` rows of its two projections, `Qr` query
rank, `Vo` value columns of `o_proj`.
"""

from __future__ import annotations

from specctl.contract.roles import MTP_LAYERS_ROLES, OPTIONAL, TensorRole
from specctl.formats.mtp.style import LayerStyle


def _role(name: str, *shape: str) -> TensorRole:
    return TensorRole(name=name, shape=shape, when=OPTIONAL)


def _layer(name: str, *shape: str) -> TensorRole:
    return _role(f"layers.{{i}}.{name}", *shape)


_AROUND: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fc.weight", ("H", "H+Ht")),
    ("embedding_norm", ("H",)),
    ("norm", ("H",)),
)
_GLOBAL: tuple[TensorRole, ...] = (
    _role("embedding", "V", "H"),
    _role("head", "V", "H"),
    *(_role(name, *shape) for name, shape in _AROUND),
    *(_layer(name, *shape) for name, shape in _AROUND),
    _layer("embedding", "V", "H"),
    _layer("head", "V", "H"),
    _layer("input_norm", "H"),
    _layer("post_attention_norm", "H"),
)
_HIDDEN_NORM: tuple[TensorRole, ...] = (_role("hidden_norm", "Ht"), _layer("hidden_norm", "Ht"))
_GROUPED: tuple[TensorRole, ...] = (
    _layer("k_proj.weight", "KV", "X"),
    _layer("v_proj.weight", "KV", "X"),
    _layer("o_proj.weight", "H", "Q"),
    _layer("q_norm", "P"),
    _layer("k_norm", "P"),
)
_GATED_QUERY = (_layer("q_proj.weight", "2*Q", "X"),)
_QUERY = (_layer("q_proj.weight", "Q", "X"),)
_LATENT: tuple[TensorRole, ...] = (
    _layer("q_proj.weight", "Q", "X"),
    _layer("self_attn.q_a_proj.weight", "Qr", "X"),
    _layer("self_attn.q_a_layernorm.weight", "Qr"),
    _layer("self_attn.q_b_proj.weight", "Q", "Qr"),
    _layer("self_attn.kv_a_proj_with_mqa.weight", "KVa", "X"),
    _layer("self_attn.kv_a_layernorm.weight", "KVr"),
    _layer("self_attn.kv_b_proj.weight", "KVb", "KVr"),
    _layer("o_proj.weight", "H", "Vo"),
)
_DENSE: tuple[TensorRole, ...] = (
    _layer("gate_proj.weight", "I", "H"),
    _layer("up_proj.weight", "I", "H"),
    _layer("down_proj.weight", "H", "I"),
)
_FUSED_DENSE: tuple[TensorRole, ...] = (
    _layer("mlp.gate_up_proj.weight", "2*I", "H"),
    _layer("down_proj.weight", "H", "I"),
)
_EXPERTS: tuple[TensorRole, ...] = (
    _layer("mlp.gate.weight", "E", "H"),
    _layer("mlp.experts.gate_up_proj", "E", "2*Ie", "H"),
    _layer("mlp.experts.down_proj", "E", "H", "Ie"),
)


# A layer of several may store copies of its own, which no manifest can say.
STACK_ROLES: tuple[TensorRole, ...] = (
    *MTP_LAYERS_ROLES,
    _layer("embedding", "V", "H"),
    _layer("head", "V", "H"),
)


def roles_of(style: LayerStyle, *, is_gated: bool, is_stream_wide: bool) -> tuple[TensorRole, ...]:
    """Return the table for layers of a kind.

    Args:
        style: kind of the layers.
        is_gated: q_proj must hold an output gate.
        is_stream_wide: the state has several rows for each position, so its norm is wider.
    """
    attention = {
        "grouped-query": (*(_GATED_QUERY if is_gated else _QUERY), *_GROUPED),
        "latent": _LATENT,
        "fused": (),
        "other": (),
        "none": (),
    }[style.attention]
    mlp = {
        "dense": _DENSE,
        "fused dense": _FUSED_DENSE,
        "experts": _EXPERTS,
        "fused experts": _EXPERTS,
    }.get(style.mlp, ())
    around = () if is_stream_wide else _HIDDEN_NORM
    return (*_GLOBAL, *around, *attention, *mlp)
