"""Tiny DSpark and DFlash drafts on disk, in the layout of Speculators, for targets of `tests.tiny`.

Layers are random. With a Markov head the draft is often right for a target whose newest token
decides most (`layer_gain` far below 1): w1 holds the target's normed embedding, w2 its head, and
the draft's own head adds next to nothing. DFlash drafts are random and rarely right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from runtime.engine.text import load_tokenizer
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import World
from tests.tiny import (
    TOKENIZER_SIZE,
    Sizes,
    Weights,
    save_shards,
    write_json,
    write_tiny_target,
)
from tests.tiny_manifest import CPU, load_tiny

Kind = Literal["vanilla", "gated", "rnn"]
_TAPS, _GROUP, _RANK = 3, 8, 6  # of DFlash2
_SMALL = 0.05  # keeps tanh of the recurrent head near its argument


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCase:
    """One variant.

    Args:
        markov: kind of head; None for a DFlash draft.
        has_selector: a DFlash2 draft, with its convolutions.
        sample_from_anchor: what slot 0 is.
        draft_vocab_size: rows of a reduced head, None for the target's vocabulary.
        has_own_embedding: the draft stores its embedding.
        sliding_window: of the lower of the two layers, None for none.
        max_position_embeddings: context of the draft.
    """

    markov: Kind | None = "vanilla"
    has_selector: bool = False
    sample_from_anchor: bool = True
    draft_vocab_size: int | None = 80
    has_own_embedding: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 512
    block_size: int = 5

    @property
    def algorithm(self) -> str:
        """The Speculators type."""
        if self.markov is not None:
            return "dspark"
        return "dflash2" if self.has_selector else "dflash"


def make_block_world(
    directory: Path,
    case: BlockCase,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> World:
    """Write and load a two-layer target and its block draft."""
    target = write_tiny_target(directory / "target", num_layers=2, layer_gain=0.08)
    draft = write_tiny_block(directory / "draft", target, case)
    manifest = emit_manifest(str(target), str(draft), manifest_dir=directory / "manifest")
    return World(
        manifest=manifest,
        models=load_tiny(manifest, device=device, dtype=dtype),
        tokenizer=load_tokenizer(target),
    )


def write_tiny_block(directory: Path, target_dir: Path, case: BlockCase) -> Path:
    """Write a draft of two layers that captures the states after both target layers."""
    config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    hidden, rows = config["hidden_size"], config["vocab_size"]
    sizes = Sizes(hidden=hidden, heads=4, kv_heads=2, head_dim=8, inner=48)
    weights = Weights(3)
    weights.linear("fc", hidden, 2 * hidden, has_bias=False, gain=1.0)
    weights.norm("hidden_norm", hidden)
    for index in range(2):
        weights.layer(
            f"layers.{index}.",
            sizes,
            input_size=hidden,
            output_gain=1.0,
            has_qkv_bias=False,
            has_o_bias=False,
            has_mlp_bias=False,
            has_qk_norm=True,
        )
    weights.norm("norm", hidden)
    ids = _map(weights.tensors, case.draft_vocab_size, rows)
    weights.normal("lm_head.weight", len(ids), hidden, std=0.8 if case.markov is None else 0.01)
    if case.has_own_embedding:
        weights.normal("embed_tokens.weight", rows, hidden, std=1.0)
    if case.markov is not None:
        target = load_file(target_dir / "model.safetensors")
        _add_heads(weights, case.markov, target, ids)
    if case.has_selector:
        _add_dflash2(weights, hidden, rows)
    save_shards(directory, weights.tensors, dtype=torch.float32, num_shards=1)
    write_json(directory / "config.json", _config(config, sizes, case, draft_rows=len(ids)))
    return directory


def _map(tensors: dict[str, torch.Tensor], size: int | None, rows: int) -> torch.Tensor:
    """Add a reduced map that holds the special ids; return the absolute ids."""
    if size is None:
        return torch.arange(rows)
    generator = torch.Generator().manual_seed(5)
    others = torch.randperm(TOKENIZER_SIZE - 3, generator=generator)[: size - 3] + 3
    ids = torch.cat((torch.arange(3), others)).sort().values
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[ids] = True
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = mask
    return ids


def _add_heads(
    weights: Weights, kind: Kind, target: Mapping[str, torch.Tensor], ids: torch.Tensor
) -> None:
    """Add a Markov head of the target's own bigrams and a random confidence head."""
    embedding = target["model.embed_tokens.weight"].float()
    scale = torch.rsqrt(embedding.pow(2).mean(-1, keepdim=True) + 1e-5)
    w1 = embedding * scale * target["model.norm.weight"].float()
    w2 = target["lm_head.weight"].float()[ids]
    rank = hidden = w1.shape[1]
    eye, empty = torch.eye(rank), torch.zeros(rank, rank)
    if kind == "gated":
        weights.normal("markov_head.gate_proj.weight", rank, hidden + rank, std=0.01)
        weights.tensors["markov_head.gate_proj.bias"] = torch.full((rank,), 6.0)
    elif kind == "rnn":
        weights.normal("markov_head.joint_proj.weight", 3 * rank, hidden + 2 * rank, std=0.02)
        joint = weights.tensors["markov_head.joint_proj.weight"]
        # The state adds a little, so that a state that skips a slot shows.
        joint[2 * rank :] = torch.cat((0.1 * eye, _SMALL * eye, empty[:, :hidden]), dim=1)
        weights.tensors["markov_head.joint_proj.bias"] = torch.zeros(3 * rank)
        w2 = w2 / _SMALL
    weights.tensors["markov_head.markov_w1.weight"] = w1
    weights.tensors["markov_head.markov_w2.weight"] = w2
    weights.normal("confidence_head.proj.weight", 1, hidden + rank, std=0.2)
    weights.normal("confidence_head.proj.bias", 1, std=0.2)


def _add_dflash2(weights: Weights, hidden: int, rows: int) -> None:
    """Add random convolutions of `_TAPS` taps near the identity, and a random selector."""
    for index in range(2):
        for name in ("attention_conv", "mlp_conv"):
            place = f"layers.{index}.{name}"
            weights.normal(f"{place}.base_kernel", 2, _TAPS, hidden, std=0.2)
            weights.tensors[f"{place}.base_kernel"][:, 0] += 1.0
            outputs = 2 * _TAPS * hidden // _GROUP
            weights.normal(f"{place}.kernel_projection.weight", outputs, hidden, std=0.05)
    weights.normal("candidate_selector.hidden_projection.weight", _RANK, hidden, std=0.3)
    for name in ("predecessor", "successor"):
        weights.normal(f"candidate_selector.{name}_codebook", rows, _RANK, std=1.0)


def _config(
    target: Mapping[str, Any], sizes: Sizes, case: BlockCase, *, draft_rows: int
) -> dict[str, Any]:
    tokens = case.block_size if case.sample_from_anchor else case.block_size - 1
    method = {"proposal_type": "greedy", "speculative_tokens": tokens}
    config = {
        "architectures": ["DSparkDraftModel" if case.markov else "DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": case.block_size,
        "draft_vocab_size": draft_rows,
        "mask_token_id": TOKENIZER_SIZE,
        "sample_from_anchor": case.sample_from_anchor,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": case.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": target["architectures"], "name_or_path": "tiny/target"},
        },
        "speculators_model_type": case.algorithm,
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layers(sizes, case, target["vocab_size"]),
    }
    if case.has_selector:
        config["architectures"] = ["DFlash2DraftModel"]
        config |= {
            "conv_group_size": _GROUP,
            "conv_kernel_size": _TAPS,
            "selector_rank": _RANK,
            "selector_top_k": 8,
        }
    if case.markov is not None:
        config |= {
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": case.markov,
            "markov_rank": sizes.hidden,
        }
    return config


def _layers(sizes: Sizes, case: BlockCase, vocab_size: int) -> dict[str, Any]:
    slides = case.sliding_window is not None
    types: Sequence[str] = ("sliding_attention" if slides else "full_attention", "full_attention")
    return {
        "attention_bias": False,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "layer_types": list(types),
        "max_position_embeddings": case.max_position_embeddings,
        "max_window_layers": 1,
        "model_type": "qwen3",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "sliding_window": case.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": slides,
        "vocab_size": vocab_size,
    }
