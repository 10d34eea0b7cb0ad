"""What one family of prediction layers looks like on disk and computes, as one value.

Invariants: a family is data. `names` are the tensors around the layers by role, `block` is where
the layers themselves lie; `{i}` stands for a layer's index. Every key starts with one of `roots`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ConcatOrder = Literal["embedding, hidden", "hidden, embedding", "separate matrices"]
NormWeight = Literal["weight", "1 + weight"]
BlockStyle = Literal["llama", "own"]

AFTER_FINAL_NORM = "target state after its final norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpFamily:
    """One row of `families.FAMILIES`.

    Args:
        name: of the format.
        title: for people.
        source: where names and meaning were read.
        layout: names the tensors that show the family; families that differ in the config only
            share it.
        marker: regular expression after the root, indexes as `{i}` escaped, that no other layout's
            keys match.
        roots: prefixes of the keys, the one that is written first.
        names: (role, key after the root) of what is not a decoder layer.
        block: prefix of the layers after the root.
        is_after_trunk: the layers are numbered on from the target's.
        optional: roles of `names` that a file may lack, besides copies of embedding and head.
        extras: regular expression after the root of tensors around the layers that are carried by
            their own name; empty without any.
        aliases: (key part, canonical key part) inside a layer, where a family has its own words.
        block_style: `llama` when a layer has q, k, v, o, two norms and an MLP or experts.
        concat_order: columns of `fc.weight`, first half first.
        hidden_input: which state the layer reads.
        recycled: which state a second step reads instead.
        norm_weight: how norm weights are applied.
        is_gated: q_proj holds queries and an output gate.
        has_usual_heads: the layer's heads are those of the config's usual fields.
        count_fields: config fields that say how many layers there are, empty when none does.
        model_types: config `model_type`s of the family; empty when tensors alone decide.
        is_served: a dense layer of it is the one that the runtime computes.
    """

    name: str
    title: str
    source: str
    layout: str
    marker: str
    roots: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    block: str
    is_after_trunk: bool = False
    optional: tuple[str, ...] = ()
    extras: str = ""
    aliases: tuple[tuple[str, str], ...] = ()
    block_style: BlockStyle = "llama"
    concat_order: ConcatOrder = "embedding, hidden"
    hidden_input: str = AFTER_FINAL_NORM
    recycled: str = "output of the layer's own last norm"
    norm_weight: NormWeight = "weight"
    is_gated: bool = False
    has_usual_heads: bool = True
    count_fields: tuple[str, ...] = ("num_nextn_predict_layers",)
    model_types: tuple[str, ...] = ()
    is_served: bool = False

    @property
    def layout_pattern(self) -> str:
        """Pattern of the generic keys that show the family's layout."""
        roots = "|".join(re.escape(root) for root in self.roots)
        return f"(?:{roots})(?:{self.marker})"

    @property
    def fuse_roles(self) -> tuple[str, ...]:
        """Roles of the matrices that join embedding and state."""
        return tuple(role for role, _ in self.names if role.startswith("fc"))

    @property
    def is_fused_once(self) -> bool:
        """Tell whether all layers share one fuse tensor."""
        return not any("{i}" in key for role, key in self.names if role.startswith("fc"))

    def is_extra(self, name: str) -> bool:
        """Tell whether a key after the root is one of the family's extras."""
        return bool(self.extras) and re.fullmatch(self.extras, name) is not None

    def key_of(self, role: str, *, root: str, index: int) -> str | None:
        """Return the key of a role of layer `index` as this family spells it, None without one.

        Args:
            role: without a layer's index: `fc.weight`, `input_norm`, `self_attn.kv_b_proj.weight`.
            root: prefix of all keys.
            index: of the layer, as stored.
        """
        for name, template in self.names:
            if name == role:
                return root + template.replace("{i}", str(index))
        if self.is_extra(role):
            return root + role
        return root + self.block.replace("{i}", str(index)) + self.native_part(role)

    def native_part(self, role: str) -> str:
        """Return the key of a layer's tensor inside the layer."""
        part = layer_key(role)
        for native, canonical in self.aliases:
            if part.startswith(canonical):
                return native + part.removeprefix(canonical)
        return part


_STEMS: tuple[tuple[str, str], ...] = (
    *((f"{name}_proj", f"self_attn.{name}_proj") for name in "qkvo"),
    *((f"{name}_proj", f"mlp.{name}_proj") for name in ("gate", "up", "down")),
)
_NORMS: tuple[tuple[str, str], ...] = (
    ("q_norm", "self_attn.q_norm.weight"),
    ("k_norm", "self_attn.k_norm.weight"),
    ("input_norm", "input_layernorm.weight"),
    ("post_attention_norm", "post_attention_layernorm.weight"),
)
_ROLE_OF_NORM = {key: role for role, key in _NORMS}
_KEY_OF_NORM = dict(_NORMS)
_ROLE_OF_STEM = {key: role for role, key in _STEMS}
_KEY_OF_STEM = dict(_STEMS)


def layer_role(part: str) -> str:
    """Return the role of a key inside a layer; parts of no dense layer keep their own name.

    `self_attn.q_proj.weight` is `q_proj.weight`, `mlp.experts.3.up_proj.weight` is itself.
    """
    if part in _ROLE_OF_NORM:
        return _ROLE_OF_NORM[part]
    stem, _, suffix = part.rpartition(".")
    return f"{_ROLE_OF_STEM[stem]}.{suffix}" if stem in _ROLE_OF_STEM else part


def layer_key(role: str) -> str:
    """Return the key inside a layer that `layer_role` gives this role."""
    if role in _KEY_OF_NORM:
        return _KEY_OF_NORM[role]
    stem, _, suffix = role.rpartition(".")
    return f"{_KEY_OF_STEM[stem]}.{suffix}" if stem in _KEY_OF_STEM else role
