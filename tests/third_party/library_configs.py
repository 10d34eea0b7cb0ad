"""Small configs of every type that Speculators 0.9.0 registers, with the fixtures' dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 64
IDS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 40, 41, 42, 50, 55, 60, 63]
_LLAMA = ("eagle3", "peagle")
_REDUCED = ("eagle3", "peagle", "dflash", "dspark", "dspark-gated", "dspark-rnn", "xpress")

TYPES = (*_REDUCED, "dflash2", "mtp")


def ids_of(name: str) -> list[int] | None:
    """Target ids of the type's draft vocabulary, None over the whole."""
    return IDS if name in _REDUCED else None


def config_of_type(name: str, target: Path) -> dict[str, Any]:
    """Return a config that the library accepts and saves."""
    kind = name.partition("-")[0]
    tokens = {"dspark": 5, "mtp": 3, "eagle3": 4, "peagle": 4}.get(kind, 4)
    config: dict[str, Any] = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)},
        },
        "transformer_layer_config": _layers("llama" if kind in _LLAMA else "qwen3"),
    }
    if kind != "mtp":
        config["draft_vocab_size"] = len(ids_of(name) or range(VOCABULARY))
    return config | _OWN[kind] | _HEADS.get(name, {})


def _layers(model_type: str) -> dict[str, Any]:
    layers: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return layers


_EAGLE: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
_BLOCK: dict[str, Any] = {
    "aux_hidden_state_layer_ids": [2, 4, 5],
    "block_size": 5,
    "mask_token_id": 63,
    "sample_from_anchor": False,
}
_OWN: dict[str, dict[str, Any]] = {
    "eagle3": _EAGLE,
    "peagle": {**_EAGLE, "norm_before_residual": False, "mask_token_id": 63},
    "dflash": _BLOCK,
    "dflash2": {
        **_BLOCK,
        "conv_group_size": 4,
        "conv_kernel_size": 2,
        "selector_rank": 3,
        "selector_top_k": 2,
        "sliding_window_non_causal": True,
    },
    "dspark": {
        **_BLOCK,
        "sample_from_anchor": True,
        "markov_rank": 3,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "xpress": {**_BLOCK, "num_jacobi_passes": 2, "xpress_mlp_ratio": 2, "xpress_rank": 3},
    "mtp": {"num_nextn_predict_layers": 1},
}
_HEADS: dict[str, dict[str, Any]] = {
    "dspark-gated": {"markov_head_type": "gated"},
    "dspark-rnn": {"markov_head_type": "rnn"},
}
