"""Build checkpoints with real names, shapes, headers and sizes whose data are holes in the files.

Nothing but headers, the index and the configs takes space on disk; a read of the data would give
zeros. *Source:* names, shapes and dtypes of the published Qwen3-32B, Qwen3-30B-A3B and DeepSeek-V3;
how their tensors spread over the shards is an equal split by bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
Row = tuple[str, str, Shape]
"""Key, dtype, shape."""

_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
_METADATA = {"format": "pt"}
_TILE = 128


def num_bytes(row: Row) -> int:
    """Return the bytes of one tensor."""
    count = 1
    for dim in row[2]:
        count *= dim
    return count * _BYTES[row[1]]


def header_text(rows: list[Row]) -> bytes:
    """Return the header as the safetensors library writes it: compact, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": _METADATA}
    place = 0
    for row in rows:
        key, dtype, shape = row
        end = place + num_bytes(row)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def shard_rows(rows: list[Row], num_shards: int) -> list[list[Row]]:
    """Return the rows in `num_shards` groups of about equal bytes, order kept."""
    share = sum(map(num_bytes, rows)) / num_shards
    groups: list[list[Row]] = [[]]
    used = 0
    for row in rows:
        if used >= share * len(groups) and len(groups) < num_shards:
            groups.append([])
        groups[-1].append(row)
        used += num_bytes(row)
    return groups


def write_checkpoint(
    root: Path, config: Mapping[str, object], rows: list[Row], num_shards: int
) -> None:
    """Write config, index and sparse shards into the new directory `root`."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(config, indent=2))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(shard_rows(rows, num_shards), 1):
        name = f"model-{number:05}-of-{num_shards:06}.safetensors"
        text = header_text(group)
        with (root / name).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            os.truncate(out.fileno(), 8 + len(text) + sum(map(num_bytes, group)))
        weight_map.update(dict.fromkeys((row[0] for row in group), name))
    index = {
        "metadata": {"total_size": sum(map(num_bytes, rows))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(path: Path, *, num_words: int, num_merges: int) -> None:
    """Write a tokenizer.json with as many entries as a real one; the words mean nothing."""
    vocab = {f"w{number:06}": number for number in range(num_words)}
    merges = [[f"w{number:06}", f"w{number + 1:06}"] for number in range(num_merges)]
    added = [{"id": num_words, "content": "<end>", "special": True, "normalized": False}]
    value = {
        "version": "1.0",
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    path.write_text(json.dumps(value, indent=2))


def _dense_rows() -> Iterator[Row]:
    hidden, inner, heads, kv_heads, head_dim, vocab = 5120, 25600, 64, 8, 128, 151936
    yield "lm_head.weight", "BF16", (vocab, hidden)
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(64):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", "BF16", (hidden,)
        yield at + "mlp.down_proj.weight", "BF16", (hidden, inner)
        yield at + "mlp.gate_proj.weight", "BF16", (inner, hidden)
        yield at + "mlp.up_proj.weight", "BF16", (inner, hidden)
        yield at + "post_attention_layernorm.weight", "BF16", (hidden,)
        yield from _qwen3_attention(at, hidden, heads, kv_heads, head_dim)
    yield "model.norm.weight", "BF16", (hidden,)


def _qwen3_attention(
    at: str, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> Iterator[Row]:
    yield at + "self_attn.k_norm.weight", "BF16", (head_dim,)
    yield at + "self_attn.k_proj.weight", "BF16", (kv_heads * head_dim, hidden)
    yield at + "self_attn.o_proj.weight", "BF16", (hidden, heads * head_dim)
    yield at + "self_attn.q_norm.weight", "BF16", (head_dim,)
    yield at + "self_attn.q_proj.weight", "BF16", (heads * head_dim, hidden)
    yield at + "self_attn.v_proj.weight", "BF16", (kv_heads * head_dim, hidden)


def _sparse_rows() -> Iterator[Row]:
    hidden, inner, heads, kv_heads, head_dim, vocab = 2048, 768, 32, 4, 128, 151936
    yield "lm_head.weight", "BF16", (vocab, hidden)
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(48):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", "BF16", (hidden,)
        for expert in range(128):
            yield f"{at}mlp.experts.{expert}.down_proj.weight", "BF16", (hidden, inner)
            yield f"{at}mlp.experts.{expert}.gate_proj.weight", "BF16", (inner, hidden)
            yield f"{at}mlp.experts.{expert}.up_proj.weight", "BF16", (inner, hidden)
        yield at + "mlp.gate.weight", "BF16", (128, hidden)
        yield at + "post_attention_layernorm.weight", "BF16", (hidden,)
        yield from _qwen3_attention(at, hidden, heads, kv_heads, head_dim)
    yield "model.norm.weight", "BF16", (hidden,)


def _scaled(key: str, rows: int, columns: int) -> Iterator[Row]:
    yield key + ".weight", "F8_E4M3", (rows, columns)
    yield key + ".weight_scale_inv", "F32", (-(-rows // _TILE), -(-columns // _TILE))


def _expert(at: str, hidden: int, inner: int) -> Iterator[Row]:
    yield from _scaled(at + "down_proj", hidden, inner)
    yield from _scaled(at + "gate_proj", inner, hidden)
    yield from _scaled(at + "up_proj", inner, hidden)


def _deepseek_layer(layer: int) -> Iterator[Row]:
    hidden, at = 7168, f"model.layers.{layer}."
    yield at + "input_layernorm.weight", "BF16", (hidden,)
    if layer < 3:
        yield from _expert(at + "mlp.", hidden, 18432)
    else:
        for expert in range(256):
            yield from _expert(f"{at}mlp.experts.{expert}.", hidden, 2048)
        yield at + "mlp.gate.e_score_correction_bias", "F32", (256,)
        yield at + "mlp.gate.weight", "BF16", (256, hidden)
        yield from _expert(at + "mlp.shared_experts.", hidden, 2048)
    yield at + "post_attention_layernorm.weight", "BF16", (hidden,)
    yield at + "self_attn.kv_a_layernorm.weight", "BF16", (512,)
    yield from _scaled(at + "self_attn.kv_a_proj_with_mqa", 576, hidden)
    yield from _scaled(at + "self_attn.kv_b_proj", 32768, 512)
    yield from _scaled(at + "self_attn.o_proj", hidden, 16384)
    yield at + "self_attn.q_a_layernorm.weight", "BF16", (1536,)
    yield from _scaled(at + "self_attn.q_a_proj", 1536, hidden)
    yield from _scaled(at + "self_attn.q_b_proj", 24576, 1536)


def _deepseek_rows() -> Iterator[Row]:
    hidden, vocab = 7168, 129280
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for layer in range(61):
        yield from _deepseek_layer(layer)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)
    yield "model.layers.61.embed_tokens.weight", "BF16", (vocab, hidden)
    yield "model.layers.61.enorm.weight", "BF16", (hidden,)
    yield "model.layers.61.hnorm.weight", "BF16", (hidden,)
    yield "model.layers.61.eh_proj.weight", "BF16", (hidden, 2 * hidden)
    yield from _deepseek_layer(61)
    yield "model.layers.61.shared_head.norm.weight", "BF16", (hidden,)
    yield "model.layers.61.shared_head.head.weight", "BF16", (vocab, hidden)


def _qwen3_config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 25600,
        "max_position_embeddings": 40960,
        "max_window_layers": 64,
        "model_type": "qwen3",
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def _sparse_config() -> dict[str, object]:
    return _qwen3_config() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    }


def _deepseek_config() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [_TILE, _TILE],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }


def _sized(
    config: Callable[[], dict[str, object]],
    rows: Callable[[], Iterator[Row]],
    num_shards: int,
    tokenizer: tuple[int, int] | None = None,
) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        write_checkpoint(root, config(), list(rows()), num_shards)
        if tokenizer is not None:
            words, merges = tokenizer
            write_tokenizer(root / "tokenizer.json", num_words=words, num_merges=merges)

    return build


SHAPES: Mapping[str, Callable[[Path], None]] = {
    "qwen3-32b": _sized(_qwen3_config, _dense_rows, 16),
    "qwen3-32b, tokenizer": _sized(_qwen3_config, _dense_rows, 16, (151643, 151387)),
    "qwen3-30b-a3b": _sized(_sparse_config, _sparse_rows, 16),
    "deepseek-v3": _sized(_deepseek_config, _deepseek_rows, 163),
    "deepseek-v3, tokenizer": _sized(_deepseek_config, _deepseek_rows, 163, (128000, 127741)),
}
"""Label -> builder of the checkpoint in a directory that does not exist yet."""
