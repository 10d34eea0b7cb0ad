"""Where the roles of a target are in its files: the key names of the Llama family.

The manifest names the embedding and the head; the layers' keys share the embedding's prefix, and
below it all families of `Decoder.family` use the same names.
*Source:* transformers `modeling_{llama,mistral,qwen2,qwen3}.py` (parameter names).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.manifest import Target

_EMBEDDING_SUFFIX = "embed_tokens.weight"

_LAYER_KEYS: Mapping[str, str] = {
    **{
        f"{name}.{kind}": f"self_attn.{name}.{kind}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for kind in ("weight", "bias")
    },
    **{
        f"{name}.{kind}": f"mlp.{name}.{kind}"
        for name in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
    },
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
}

# Buffers that old exports store although they follow from the config.
_IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
)


def target_keys(target: Target, roles: Iterable[str]) -> dict[str, str]:
    """Return role -> key in the target's files.

    Raises:
        DiagnosticError: SD815, the embedding's key has no prefix that the layers could share.
    """
    if not target.embedding.key.endswith(_EMBEDDING_SUFFIX):
        raise DiagnosticError(
            diagnose(
                "SD815",
                where="manifest#/target/embedding/key",
                message=f"embedding key `{target.embedding.key}` names no prefix of the layers",
                expected=f"<prefix>{_EMBEDDING_SUFFIX}",
                found=target.embedding.key,
            )
        )
    prefix = target.embedding.key.removesuffix(_EMBEDDING_SUFFIX)
    return {role: _key(role, target, prefix) for role in roles}


def is_ignored(key: str) -> bool:
    """Tell whether a stored tensor is a known buffer that no model needs."""
    return key.endswith(_IGNORED_SUFFIXES)


def _key(role: str, target: Target, prefix: str) -> str:
    named = {
        "embedding": target.embedding.key,
        "head": target.head.key,
        "norm": f"{prefix}norm.weight",
    }
    if role in named:
        return named[role]
    _, index, layer_role = role.split(".", 2)
    return f"{prefix}layers.{index}.{_LAYER_KEYS[layer_role]}"
