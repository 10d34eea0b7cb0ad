"""A tiny draft that is often right: it reads the newest token and applies the target's own head.

Made for targets whose newest token decides most of the next (`layer_gain` below 1). Attention looks
at its own row (query and key are one projection, so a row matches itself best), its values hand
over the token's embedding and take the state away (`norm_before_residual`), and the MLP is empty.
What the context adds in the target and the ids outside the map decide what is rejected: with the
pair below chains of gamma 4 are accepted to every depth (accept length about 1.7).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_pair import Pair

_GAIN = 12.0  # of queries and keys: attention all but ignores other rows


def write_agreeing_pair(directory: Path, *, num_speculative_tokens: int = 4) -> Pair:
    """Write a target and a draft of which every acceptance pattern occurs."""
    target = write_tiny_target(directory / "target", layer_gain=0.15)
    draft = write_agreeing_eagle3(
        directory / "draft", target, num_speculative_tokens=num_speculative_tokens
    )
    return Pair(target=target, draft=draft)


def write_agreeing_eagle3(
    directory: Path,
    target_dir: Path,
    *,
    draft_vocab_size: int | None = 80,
    num_speculative_tokens: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write the draft for a llama or qwen2 target of `tests.tiny` (hidden 32)."""
    write_tiny_eagle3(
        directory,
        target_dir,
        has_norm_before_residual=True,
        draft_vocab_size=draft_vocab_size,
        num_speculative_tokens=num_speculative_tokens,
        num_kv_heads=4,
        dtype=dtype,
    )
    path = directory / "model.safetensors"
    tensors = load_file(path)
    target = load_file(target_dir / "model.safetensors")
    hidden = tensors["norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(9)
    rotation = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
    eye, empty = torch.eye(hidden), torch.zeros(hidden, hidden)
    match = torch.cat((_GAIN * rotation, empty), dim=1)
    head = target["lm_head.weight"].float()
    if draft_vocab_size is not None:
        head = head[tensors["d2t"] + torch.arange(draft_vocab_size)]
    made = {
        "layers.0.self_attn.q_proj.weight": match,
        "layers.0.self_attn.k_proj.weight": match,
        "layers.0.self_attn.v_proj.weight": torch.cat((eye, -eye), dim=1),
        "layers.0.self_attn.o_proj.weight": eye,
        "layers.0.input_layernorm.weight": torch.ones(hidden),
        "layers.0.hidden_norm.weight": torch.ones(hidden),
        "layers.0.mlp.down_proj.weight": torch.zeros_like(tensors["layers.0.mlp.down_proj.weight"]),
        "norm.weight": target["model.norm.weight"].float(),
        "lm_head.weight": head,
    }
    save_file(
        tensors | {name: value.to(dtype).contiguous() for name, value in made.items()},
        path,
        metadata={"format": "pt"},
    )
    return directory
