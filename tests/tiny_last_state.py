"""Tiny drafts that read the target's last state: prediction layers (MTP) and EAGLE-1.

An agreeing draft is often right beside a target whose newest token decides most of the next
(`layer_gain` well below 1): fc passes the embedding on and little of the state, and the layers
change the stream little. MTP norms before the head as the target does; for EAGLE-1 the target's
norm weight is part of fc, because its head reads the raw output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import World
from tests.tiny import Sizes, Weights, save_shards, write_json, write_tiny_target
from tests.tiny_manifest import CPU, load_tiny

Kind = Literal["mtp", "eagle"]
LAYER_GAIN = 0.15
NOISE = 0.1


def write_mtp(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 3,
    num_layers: int = 1,
    has_own_vocabulary: bool = False,
    is_agreeing: bool = False,
    max_position_embeddings: int = 512,
) -> Path:
    """Write dense prediction layers in DeepSeek's layout, numbered on from the target's.

    Args:
        has_own_vocabulary: an embedding and a head of their own in place of the target's.
    """
    target = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    hidden, depth = target["hidden_size"], target["num_hidden_layers"]
    weights = Weights(seed)
    for index in range(depth, depth + num_layers):
        prefix = f"model.layers.{index}."
        weights.norm(f"{prefix}enorm", hidden)
        weights.norm(f"{prefix}hnorm", hidden)
        weights.linear(f"{prefix}eh_proj", hidden, 2 * hidden, has_bias=False, gain=1.0)
        weights.norm(f"{prefix}shared_head.norm", hidden)
        _layer(weights, prefix, target, is_agreeing=is_agreeing)
        if is_agreeing:
            noise = weights.tensors[f"{prefix}eh_proj.weight"] * NOISE
            weights.tensors |= {
                f"{prefix}enorm.weight": torch.ones(hidden),
                f"{prefix}eh_proj.weight": noise + _passing(torch.ones(hidden)),
                f"{prefix}shared_head.norm.weight": _target_norm(target_dir),
            }
    if has_own_vocabulary:
        prefix, rows = f"model.layers.{depth}.", target["vocab_size"]
        weights.normal(f"{prefix}embed_tokens.weight", rows, hidden, std=1.0)
        weights.normal(f"{prefix}shared_head.head.weight", rows, hidden, std=0.8)
    config = _config(target, max_position_embeddings) | {
        "architectures": ["LlamaForCausalLMNextN"],
        "num_nextn_predict_layers": num_layers,
    }
    write_json(directory / "config.json", config)
    save_shards(directory, weights.tensors, dtype=torch.bfloat16, num_shards=1)
    return directory


def write_eagle1(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 4,
    num_layers: int = 1,
    has_bias: bool = False,
    is_agreeing: bool = False,
) -> Path:
    """Write an EAGLE-1 draft in SafeAILab's layout; `has_bias` makes it one of HASS."""
    target = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    hidden = target["hidden_size"]
    weights = Weights(seed)
    weights.linear("fc", hidden, 2 * hidden, has_bias=has_bias, gain=1.0)
    for index in range(num_layers):
        _layer(weights, f"layers.{index}.", target, is_agreeing=is_agreeing)
    del weights.tensors["layers.0.input_layernorm.weight"]
    if is_agreeing:
        noise = weights.tensors["fc.weight"] * NOISE
        weights.tensors["fc.weight"] = noise + _passing(_target_norm(target_dir))
    config = _config(target, 512) | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "bias": has_bias,
    }
    write_json(directory / "config.json", config)
    save_shards(directory, weights.tensors, dtype=torch.bfloat16, num_shards=1)
    return directory


def write_normed_eagle1(directory: Path, target_dir: Path) -> Path:
    """Write an EAGLE-1 draft with bias and extra norms in the layout of Speculators 0.1 to 0.6."""
    write_eagle1(directory, target_dir, has_bias=True)
    path = directory / "model.safetensors"
    weights = Weights(8)
    hidden = json.loads((target_dir / "config.json").read_text("utf-8"))["hidden_size"]
    for name in ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm"):
        weights.norm(name, hidden)
    for key, value in load_file(path).items():
        new = key.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")
        weights.tensors[new] = value
    flat = json.loads((directory / "config.json").read_text("utf-8"))
    layers = {name: flat[name] for name in flat if name not in ("architectures", "bias")}
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_version": "0.5.0",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "fusion_bias": True,
        "layernorms": True,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny/target"},
        },
        "transformer_layer_config": layers,
    }
    write_json(directory / "config.json", config)
    save_shards(directory, weights.tensors, dtype=torch.bfloat16, num_shards=1)
    return directory


def last_state_world(
    directory: Path,
    kind: Kind,
    *,
    num_layers: int = 1,
    token_map: Sequence[int] | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> World:
    """Write and load a target and an agreeing draft, through `specctl manifest`.

    Args:
        token_map: target ids that the draft may propose; None: all.
    """
    from runtime.engine.text import load_tokenizer

    target = write_tiny_target(directory / "target", num_layers=2, layer_gain=LAYER_GAIN)
    write = write_mtp if kind == "mtp" else write_eagle1
    draft = write(directory / "draft", target, num_layers=num_layers, is_agreeing=True)
    path = None
    if token_map is not None:
        path = directory / "token_map.json"
        path.write_text(json.dumps(list(token_map)), encoding="utf-8")
    manifest = emit_manifest(
        str(target),
        str(draft),
        num_speculative_tokens=3,
        token_map=None if path is None else str(path),
    )
    return World(
        manifest=manifest,
        models=load_tiny(manifest, device=device, dtype=dtype),
        tokenizer=load_tokenizer(target),
    )


def _layer(weights: Weights, prefix: str, target: dict[str, int], *, is_agreeing: bool) -> None:
    sizes = Sizes(hidden=target["hidden_size"], heads=4, kv_heads=2, head_dim=8, inner=48)
    weights.layer(
        prefix,
        sizes,
        input_size=sizes.hidden,
        output_gain=LAYER_GAIN if is_agreeing else 1.0,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
    )


def _config(target: dict[str, int], max_position_embeddings: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": target["num_hidden_layers"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": target["vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _passing(scale_H: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.diag(scale_H), torch.zeros(len(scale_H), len(scale_H))), dim=1)


def _target_norm(target_dir: Path) -> torch.Tensor:
    return load_file(target_dir / "model.safetensors")["model.norm.weight"].float()
