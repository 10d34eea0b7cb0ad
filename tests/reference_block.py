"""A plain forward pass of a block draft, read off the files under their published names.

One block at a time, float32, no masks: context and block lie side by side in one attention. It
shares no code with specctl or the runtime.
*Source:* arXiv 2602.06036 (DFlash); z-lab/dflash 0.1.0 for the local convolutions of DFlash2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Numbers of the config that the tensors do not show."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    block: int
    mask_id: int
    theta: float = 10000.0
    group: int = 0


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn [tokens, heads, head_dim] by its positions."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, None].float() * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(
    tensors: Tensors, place: str, shape: Shape, context: torch.Tensor, block: torch.Tensor
) -> torch.Tensor:
    """Let every slot see all context entries and all slots."""
    start = context.shape[0]
    both = torch.cat((context, block))
    positions = torch.arange(start + block.shape[0])

    def project(name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
        rows = F.linear(x, tensors[f"{place}{name}_proj.weight"])
        return rows.view(x.shape[0], heads, shape.head_dim)

    query = norm(project("q", block, shape.heads), tensors[f"{place}q_norm.weight"], shape.eps)
    key = norm(project("k", both, shape.kv_heads), tensors[f"{place}k_norm.weight"], shape.eps)
    value = project("v", both, shape.kv_heads)
    query = rotate(query, positions[start:], shape.theta)
    key = rotate(key, positions, shape.theta)
    share = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * shape.head_dim**-0.5
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return F.linear(mixed.flatten(1), tensors[f"{place}o_proj.weight"])


def convolve(
    x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, group: int
) -> torch.Tensor:
    """Sum each slot and the slots before it, tap by tap; kernels change with slot and group."""
    found = torch.zeros_like(x)
    for tap in range(base.shape[0]):
        earlier = F.pad(x, (0, 0, tap, 0))[: x.shape[0]]
        kernel = base[tap] + dynamic[:, tap].repeat_interleave(group, dim=-1)
        found = found + kernel * earlier
    return found


def around(
    tensors: Tensors, place: str, shape: Shape, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the input of a sub-layer and the kernels for its output."""
    base = tensors.get(f"{place}base_kernel")
    if base is None:
        return x, None
    taps, groups = base.shape[1], x.shape[-1] // shape.group
    dynamic = F.linear(x, tensors[f"{place}kernel_projection.weight"])
    dynamic = dynamic.view(x.shape[0], 2, taps, groups)
    return convolve(x, base[0], dynamic[:, 0], shape.group), dynamic[:, 1]


def after(
    tensors: Tensors, place: str, shape: Shape, x: torch.Tensor, dynamic: torch.Tensor | None
) -> torch.Tensor:
    if dynamic is None:
        return x
    return convolve(x, tensors[f"{place}base_kernel"][1], dynamic, shape.group)


def block_logits(
    tensors: Tensors,
    shape: Shape,
    *,
    embedding: torch.Tensor,
    head: torch.Tensor,
    ids: torch.Tensor,
    states: torch.Tensor,
    anchor: int,
) -> torch.Tensor:
    """Return the logits [block, R] of the block whose slot 0 is the token at `anchor`.

    Args:
        tensors: the draft's, by their names in a DFlash file.
        shape: numbers of the config.
        embedding: input embedding [V, H].
        head: output head [R, H].
        ids: token ids of the sequence.
        states: captured states [tokens, A * H].
        anchor: its position; the context is what lies before it.
    """
    fused = F.linear(states[:anchor], tensors["fc.weight"])
    context = norm(fused, tensors["hidden_norm.weight"], shape.eps)
    slots = torch.full((shape.block,), shape.mask_id)
    slots[0] = ids[anchor]
    x = embedding[slots]
    for index in range(shape.layers):
        place = f"layers.{index}."
        h = norm(x, tensors[f"{place}input_layernorm.weight"], shape.eps)
        h, dynamic = around(tensors, f"{place}attention_conv.", shape, h)
        h = attend(tensors, f"{place}self_attn.", shape, context, h)
        x = x + after(tensors, f"{place}attention_conv.", shape, h, dynamic)
        h = norm(x, tensors[f"{place}post_attention_layernorm.weight"], shape.eps)
        h, dynamic = around(tensors, f"{place}mlp_conv.", shape, h)
        gate = F.silu(F.linear(h, tensors[f"{place}mlp.gate_proj.weight"]))
        up = F.linear(h, tensors[f"{place}mlp.up_proj.weight"])
        h = F.linear(gate * up, tensors[f"{place}mlp.down_proj.weight"])
        x = x + after(tensors, f"{place}mlp_conv.", shape, h, dynamic)
    return F.linear(norm(x, tensors["norm.weight"], shape.eps), head)
