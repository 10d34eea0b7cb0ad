"""Which tensors a decoder layer is made of: role -> shape, from the manifest's facts alone.

Roles are the manifest's canonical names without the `layers.<i>.` prefix. One table serves the check
at load (missing, wrong shape, left over) and the builders, so that the two cannot disagree.
Legend: D hidden size, H attention heads, G kv heads, P head dim, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specctl.contract.manifest import Decoder

TensorSource = Callable[[str], torch.Tensor]
"""Role -> tensor, already in the model's dtype and on its device."""

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(decoder: Decoder, *, attention_input_size: int | None = None) -> Shapes:
    """Return role -> shape [out, in] of one layer.

    Args:
        decoder: facts of the stack.
        attention_input_size: columns of q, k and v; the hidden size unless given (EAGLE-3: 2 D).
    """
    hidden, inner, head_dim = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    source = attention_input_size or hidden
    rows = {
        "q_proj": decoder.num_attention_heads * head_dim,
        "k_proj": decoder.num_kv_heads * head_dim,
        "v_proj": decoder.num_kv_heads * head_dim,
    }
    shapes: Shapes = {f"{name}.weight": (out, source) for name, out in rows.items()}
    if decoder.has_qkv_bias:
        shapes |= {f"{name}.bias": (out,) for name, out in rows.items()}
    shapes["o_proj.weight"] = (hidden, rows["q_proj"])
    if decoder.has_o_bias:
        shapes["o_proj.bias"] = (hidden,)
    if decoder.has_qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes |= {f"{name}.weight": shape for name, shape in mlp.items()}
    if decoder.has_mlp_bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in mlp.items()}
    return shapes | {"input_norm": (hidden,), "post_attention_norm": (hidden,)}


def with_prefix(shapes: Shapes, prefix: str) -> Shapes:
    """Return the same table with every role prefixed."""
    return {prefix + role: shape for role, shape in shapes.items()}


def layer_source(take: TensorSource, layer_index: int) -> TensorSource:
    """Return a source that knows the roles of one layer without their prefix."""
    return lambda role: take(f"layers.{layer_index}.{role}")
