"""Tiny random targets and EAGLE-3 drafts on disk, in the layouts that real ones have.

Scales are chosen so that logits differ clearly and greedy text is not constant; every target has
embedding rows beyond the tokenizer, so that padding rows are always exercised.
`tests.tiny_manifest` turns the directories into manifests and loaded models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TOKENIZER_SIZE = 3 + len(CHARACTERS)
VOCAB_SIZE = 104
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ARCHITECTURES: Mapping[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Dimensions of a stack of layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


# mistral and qwen3 have heads * head_dim != hidden.
SIZES: Mapping[Family, Sizes] = {
    "llama": Sizes(hidden=32, heads=4, kv_heads=2, head_dim=8, inner=64),
    "mistral": Sizes(hidden=48, heads=3, kv_heads=1, head_dim=8, inner=80),
    "qwen2": Sizes(hidden=32, heads=4, kv_heads=2, head_dim=8, inner=64),
    "qwen3": Sizes(hidden=48, heads=4, kv_heads=2, head_dim=16, inner=64),
}


class Weights:
    """Seeded random tensors by name."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int, std: float) -> None:
        self.tensors[name] = torch.randn(shape, generator=self._generator) * std

    def linear(self, name: str, rows: int, columns: int, *, has_bias: bool, gain: float) -> None:
        self.normal(f"{name}.weight", rows, columns, std=gain * columns**-0.5)
        if has_bias:
            self.normal(f"{name}.bias", rows, std=0.3)

    def norm(self, name: str, size: int) -> None:
        self.normal(f"{name}.weight", size, std=0.2)
        self.tensors[f"{name}.weight"] += 1.0

    def layer(
        self,
        prefix: str,
        sizes: Sizes,
        *,
        input_size: int,
        output_gain: float,
        has_qkv_bias: bool,
        has_o_bias: bool,
        has_mlp_bias: bool,
        has_qk_norm: bool,
    ) -> None:
        rows = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
        for letter, heads in rows.items():
            name = f"{prefix}self_attn.{letter}_proj"
            self.linear(name, heads * sizes.head_dim, input_size, has_bias=has_qkv_bias, gain=1.3)
            if has_qk_norm and letter != "v":
                self.norm(f"{prefix}self_attn.{letter}_norm", sizes.head_dim)
        width = sizes.heads * sizes.head_dim
        self.linear(
            f"{prefix}self_attn.o_proj", sizes.hidden, width, has_bias=has_o_bias, gain=output_gain
        )
        for name, out, source, gain in (
            ("gate", sizes.inner, sizes.hidden, 1.2),
            ("up", sizes.inner, sizes.hidden, 1.2),
            ("down", sizes.hidden, sizes.inner, output_gain),
        ):
            self.linear(f"{prefix}mlp.{name}_proj", out, source, has_bias=has_mlp_bias, gain=gain)
        self.norm(f"{prefix}input_layernorm", sizes.hidden)
        self.norm(f"{prefix}post_attention_layernorm", sizes.hidden)


def write_tiny_target(
    directory: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    num_layers: int = 4,
    layer_gain: float = 1.0,
    is_tied: bool = False,
    has_attention_bias: bool = False,
    has_mlp_bias: bool = False,
    sliding_window: int | None = None,
    rope_parameters: Mapping[str, Any] | None = None,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    num_shards: int = 1,
    sizes: Sizes | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> Path:
    """Write config, weights and tokenizer of a random target; return its directory.

    Args:
        layer_gain: how much layers change the stream; below 0.5 the newest token decides most.
        has_attention_bias: llama and qwen3 only (q, k, v and o); qwen2 always biases q, k, v.
        has_mlp_bias: llama only.
        sliding_window: mistral slides all layers, qwen2 and qwen3 the upper half.
        rope_parameters: as transformers 5 writes them; default theta 10000.
        dtype: storage dtype.
        num_shards: more than one writes an index.
        vocab_size: embedding rows; those beyond the tokenizer are padding.
    """
    sizes = sizes or SIZES[family]
    weights = Weights(seed)
    weights.normal("model.embed_tokens.weight", vocab_size, sizes.hidden, std=1.0)
    for index in range(num_layers):
        weights.layer(
            f"model.layers.{index}.",
            sizes,
            input_size=sizes.hidden,
            output_gain=layer_gain,
            has_qkv_bias=has_attention_bias or family == "qwen2",
            has_o_bias=has_attention_bias,
            has_mlp_bias=has_mlp_bias,
            has_qk_norm=family == "qwen3",
        )
    weights.norm("model.norm", sizes.hidden)
    if not is_tied:
        weights.normal("lm_head.weight", vocab_size, sizes.hidden, std=0.8)
    config = _layer_config(family, sizes, num_layers, max_position_embeddings) | {
        "architectures": [ARCHITECTURES[family]],
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": dict(rope_parameters or {"rope_type": "default", "rope_theta": 1e4}),
        "tie_word_embeddings": is_tied,
        "vocab_size": vocab_size,
    }
    if has_attention_bias:
        config["attention_bias"] = True
    if has_mlp_bias:
        config["mlp_bias"] = True
    if family == "mistral" or sliding_window is not None:
        config["sliding_window"] = sliding_window
    if family in ("qwen2", "qwen3") and sliding_window is not None:
        config |= {"use_sliding_window": True, "max_window_layers": num_layers // 2}
    write_json(directory / "config.json", config)
    save_shards(directory, weights.tensors, dtype=dtype, num_shards=num_shards)
    write_tokenizer(directory)
    return directory


def write_tiny_eagle3(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 1,
    family: Literal["llama", "qwen3"] = "llama",
    num_layers: int = 1,
    hidden_size: int | None = None,
    num_kv_heads: int = 2,
    draft_vocab_size: int | None = 64,
    has_own_embedding: bool = False,
    has_biases: bool = False,
    has_norm_before_residual: bool = False,
    has_norm_before_fc: bool = False,
    has_fc_norm: bool = False,
    has_norm_output: bool = False,
    boundary_ids: Sequence[int] = (1, 2, 4),
    num_speculative_tokens: int = 4,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a random Speculators-layout EAGLE-3 draft for the target; return its directory.

    Args:
        hidden_size: None for the target's; another one needs `has_own_embedding`.
        has_biases: of fc, attention and MLP.
        draft_vocab_size: rows of the reduced head, None for the target's vocabulary.
        boundary_ids: aux layers in boundary numbering (k = after k blocks).
    """
    target = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    hidden = hidden_size or target["hidden_size"]
    sizes = Sizes(hidden=hidden, heads=4, kv_heads=num_kv_heads, head_dim=8, inner=48)
    target_rows = target["vocab_size"]
    rows = draft_vocab_size or target_rows
    states = len(boundary_ids)
    weights = Weights(seed)
    wide = states * target["hidden_size"]
    weights.linear("fc", hidden, wide, has_bias=has_biases, gain=1.0)
    if has_norm_before_fc:
        weights.norm("input_norm", wide)
    for index in range(states if has_fc_norm else 0):
        weights.norm(f"fc_norm.{index}", target["hidden_size"])
    for index in range(num_layers):
        weights.layer(
            f"layers.{index}.",
            sizes,
            input_size=2 * hidden if index == 0 else hidden,
            output_gain=1.0,
            has_qkv_bias=has_biases,
            has_o_bias=has_biases,
            has_mlp_bias=has_biases,
            has_qk_norm=family == "qwen3",
        )
    weights.norm("layers.0.hidden_norm", hidden)
    weights.norm("norm", hidden)
    weights.normal("lm_head.weight", rows, hidden, std=0.8)
    if has_own_embedding:
        weights.normal("embed_tokens.weight", target_rows, hidden, std=1.0)
    if draft_vocab_size is not None:
        _add_map(weights.tensors, draft_vocab_size, target_rows, seed)
    layer_config = _layer_config(family, sizes, num_layers, max_position_embeddings) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "vocab_size": target_rows,
        "tie_word_embeddings": False,
    }
    if has_biases:
        layer_config |= {"attention_bias": True, "mlp_bias": True}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(boundary_ids),
        "fc_norm": has_fc_norm,
        "norm_before_fc": has_norm_before_fc,
        "norm_before_residual": has_norm_before_residual,
        "norm_output": has_norm_output,
        "speculators_config": _speculators_config(target, num_speculative_tokens),
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": target["hidden_size"],
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config,
    }
    write_json(directory / "config.json", config)
    save_shards(directory, weights.tensors, dtype=dtype, num_shards=1)
    return directory


def save_shards(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    num_shards: int,
) -> None:
    """Write one file, or shards with an index; integers and masks keep their dtype."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in tensors.items()
    }
    if num_shards == 1:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(stored)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: stored[name] for name in names[shard::num_shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(value.numel() * value.element_size() for value in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of single characters: text is a token per character, ASCII only."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": UNK_ID, "<s>": BOS_ID, "</s>": EOS_ID}
    vocab |= {character: len(vocab) + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    write_json(directory / "tokenizer_config.json", config)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON file, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _layer_config(
    family: Family, sizes: Sizes, num_layers: int, max_position_embeddings: int
) -> dict[str, Any]:
    return {
        "model_type": family,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "max_position_embeddings": max_position_embeddings,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-5,
    }


def _speculators_config(target: Mapping[str, Any], num_speculative_tokens: int) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": num_speculative_tokens,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": target["architectures"], "name_or_path": "tiny/target"},
    }


def _add_map(
    tensors: dict[str, torch.Tensor], draft_vocab_size: int, target_rows: int, seed: int
) -> None:
    """Add an ascending reduced map that holds the special ids, and its mask."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(TOKENIZER_SIZE - 3, generator=generator)[: draft_vocab_size - 3] + 3
    ids = torch.cat((torch.arange(3), others)).sort().values
    mask = torch.zeros(target_rows, dtype=torch.bool)
    mask[ids] = True
    tensors["d2t"] = ids - torch.arange(draft_vocab_size)
    tensors["t2d"] = mask
