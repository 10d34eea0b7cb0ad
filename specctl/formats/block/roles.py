"""Role tables of the block drafts: what each tensor is, its shape, and when it exists.

Shapes use `contract.roles.SHAPE_SYMBOLS` and `BLOCK_SYMBOLS`, whose sizes readers put into
`DraftCheckpoint.sizes`. `M` is the rank of whichever low-rank head there is.
*Source:* z-lab/dflash; Speculators 0.9 dflash, dflash2, dspark, xpress; SpecForge Domino;
poolside Laguna DFlash (fused projection, gate, one norm for each captured state).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.contract.roles import (
    ALWAYS,
    DFLASH2_HEADS,
    DSPARK_ROLES,
    LAYER_ROLES,
    OPTIONAL,
    TensorRole,
)

BLOCK_SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "B": "slots of the trained block",
        "E": "width of Domino's prefix embedding",
        "F": "inner size of the refiner",
        "G": "width of Domino's prefix GRU",
        "KA": "latent attention: key/value rank and rotary dimensions",
        "KB": "latent attention: heads times (non-rotary and value dimensions)",
        "KR": "latent attention: key/value rank",
        "N": "attention heads",
        "OV": "latent attention: heads times value dimension",
        "QA": "latent attention: query rank",
        "QB": "latent attention: heads times query dimension",
        "QKV": "query, key and value rows together",
    }
)


def _role(name: str, *shape: str, when: str = ALWAYS) -> TensorRole:
    return TensorRole(name=name, shape=shape, when=when)


_HEAD_PREFIXES = ("markov", "confidence")
_LAYERS = "layers.{i}."
_SPLIT = tuple(f"{_LAYERS}{name}_proj.weight" for name in "qkv")
_LATENT_OUT = (*_SPLIT, f"{_LAYERS}o_proj.weight", f"{_LAYERS}q_norm", f"{_LAYERS}k_norm")

# What every block draft has outside its layers, and the heads of DSpark.
_GLOBALS = tuple(
    role
    for role in DSPARK_ROLES
    if role not in LAYER_ROLES and not role.name.startswith(_HEAD_PREFIXES)
)
DSPARK_HEADS = tuple(role for role in DSPARK_ROLES if role.name.startswith(_HEAD_PREFIXES))

_VARIANTS: tuple[TensorRole, ...] = (
    _role("fc_norm.{i}", "Ht", when="fc_norm"),
    _role("layers.{i}.attention_sink", "N", when=OPTIONAL),
)

# One projection for query, key and value, and one gate for each head.
_FUSED_LAYERS: tuple[TensorRole, ...] = (
    _role("layers.{i}.qkv_proj.weight", "QKV", "X"),
    _role("layers.{i}.head_gate.weight", "N", "X", when=OPTIONAL),
    *(role for role in LAYER_ROLES if role.name not in _SPLIT),
)

# Latent attention, as DeepSeek-V2 names it.
_LATENT_LAYERS: tuple[TensorRole, ...] = (
    _role("layers.{i}.q_proj.weight", "QB", "H", when=OPTIONAL),
    _role("layers.{i}.q_a_proj.weight", "QA", "H", when=OPTIONAL),
    _role("layers.{i}.q_a_norm", "QA", when=OPTIONAL),
    _role("layers.{i}.q_b_proj.weight", "QB", "QA", when=OPTIONAL),
    _role("layers.{i}.kv_a_proj.weight", "KA", "H"),
    _role("layers.{i}.kv_a_norm", "KR"),
    _role("layers.{i}.kv_b_proj.weight", "KB", "KR"),
    _role("layers.{i}.o_proj.weight", "H", "OV"),
    *(role for role in LAYER_ROLES if role.name not in _LATENT_OUT),
)

# What Gemma layers have beside a Llama layer's two norms.
_SANDWICH: tuple[TensorRole, ...] = (
    _role("layers.{i}.pre_feedforward_norm", "H", when=OPTIONAL),
    _role("layers.{i}.post_feedforward_norm", "H", when=OPTIONAL),
    _role("layers.{i}.layer_scalar", "1", when=OPTIONAL),
)

DFLASH_ROLES: tuple[TensorRole, ...] = (*_GLOBALS, *LAYER_ROLES, *_VARIANTS)
FUSED_ROLES: tuple[TensorRole, ...] = (*_GLOBALS, *_FUSED_LAYERS, *_VARIANTS)
LATENT_ROLES: tuple[TensorRole, ...] = (*_GLOBALS, *_LATENT_LAYERS, *_VARIANTS)
GEMMA_ROLES: tuple[TensorRole, ...] = (*DFLASH_ROLES, *_SANDWICH)

DOMINO_HEADS: tuple[TensorRole, ...] = (
    _role("prefix_gru.input", "3*G", "H"),
    _role("prefix_gru.hidden", "3*G", "G"),
    _role("prefix_embedding.in", "E", "H+G"),
    _role("prefix_embedding.out", "V", "E"),
)

XPRESS_HEADS: tuple[TensorRole, ...] = (
    _role("refiner.token_embedding", "V", "M"),
    _role("refiner.down_hidden", "M", "H"),
    _role("refiner.down_block", "M", "H"),
    _role("refiner.in_proj", "M", "3*M"),
    _role("refiner.mix", "M", "B", "B"),
    _role("refiner.mlp_gate", "F", "M"),
    _role("refiner.mlp_up", "F", "M"),
    _role("refiner.mlp_down", "M", "F"),
    _role("refiner.readout", "R", "M"),
)

DFLASH2_ROLES: tuple[TensorRole, ...] = (*DFLASH_ROLES, *DFLASH2_HEADS)
DOMINO_ROLES: tuple[TensorRole, ...] = (*DFLASH_ROLES, *DOMINO_HEADS)
XPRESS_ROLES: tuple[TensorRole, ...] = (*DFLASH_ROLES, *XPRESS_HEADS)
