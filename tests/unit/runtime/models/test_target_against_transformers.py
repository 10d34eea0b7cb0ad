"""Every family against the reference implementation, on the same random weights in fp32.

Tolerance: both sides sum in fp32 in different orders; over 4 layers the largest difference seen is
about 2e-5 on logits of magnitude 15, so 1e-4 fails on any wrong term.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runtime.models import TargetModel
from tests.paged import Paged, Span
from tests.tiny import TOKENIZER_SIZE, Family, write_tiny_target
from tests.tiny_manifest import load_tiny, tiny_manifest

TOLERANCE = 1e-4
LENGTH = 90

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"has_attention_bias": True, "has_mlp_bias": True}),
    "llama-tied": ("llama", {"is_tied": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2-bias": ("qwen2", {}),
    "qwen2-half-window": ("qwen2", {"sliding_window": 24}),
    "qwen3-qk-norm": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"has_attention_bias": True, "is_tied": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    directory = write_tiny_target(tmp_path, family, num_shards=2, **options)
    model = load_tiny(tiny_manifest(directory)).target
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(3, TOKENIZER_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected = reference(ids[None], output_hidden_states=True)
        logits, aux = _run_in_two_chunks(model, ids)
    size = TOKENIZER_SIZE
    assert float((logits[:, :size] - expected.logits[0, :, :size]).abs().max()) < TOLERANCE
    assert bool((logits[:, size:] == float("-inf")).all())
    # hidden_states[k] is the stream after k blocks; the last one is already normed there.
    for tap, boundary in ((-1, 0), (0, 1), (model.num_layers - 2, model.num_layers - 1)):
        difference = aux[tap] - expected.hidden_states[boundary][0]
        assert float(difference.abs().max()) < TOLERANCE


def test_last_tap_is_the_stream_before_the_final_norm(tmp_path: Path) -> None:
    directory = write_tiny_target(tmp_path)
    model = load_tiny(tiny_manifest(directory)).target
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    reference.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = torch.arange(10, 60)
    with torch.inference_mode():
        reference(ids[None])
        _, aux = _run_in_two_chunks(model, ids)
    assert float((aux[model.num_layers - 1] - seen[0][0]).abs().max()) < TOLERANCE


def test_greedy_ids_are_the_argmax_of_logits_below_the_tokenizer_size(tmp_path: Path) -> None:
    model = load_tiny(tiny_manifest(write_tiny_target(tmp_path, "qwen3"))).target
    hidden = torch.randn(33, 48, generator=torch.Generator().manual_seed(1))
    # Padding rows would win if they counted.
    model.head_VD[TOKENIZER_SIZE:] *= 100
    logits = model.logits(hidden)
    assert torch.equal(model.greedy_ids(hidden), logits.argmax(dim=1))
    assert model.num_reachable_ids == TOKENIZER_SIZE
    assert logits.shape == (33, model.facts.vocab_size)


def test_aux_states_keep_the_order_asked_for(tmp_path: Path) -> None:
    model = load_tiny(tiny_manifest(write_tiny_target(tmp_path))).target
    paged = Paged(model.kv_specs, num_requests=1, max_length=16)
    batch = paged.batch([Span(request=0, start=0, ids=[5, 6, 7])])
    ascending = model.forward(batch, paged.pool.layers, (-1, 1, 3)).aux_hidden_NA
    descending = model.forward(batch, paged.pool.layers, (3, 1, -1)).aux_hidden_NA
    assert ascending is not None
    assert descending is not None
    assert torch.equal(torch.cat(ascending.chunk(3, dim=1)[::-1], dim=1), descending)
    assert model.forward(batch, paged.pool.layers).aux_hidden_NA is None


def test_tied_head_shares_the_tensor(tmp_path: Path) -> None:
    model = load_tiny(tiny_manifest(write_tiny_target(tmp_path, is_tied=True))).target
    assert model.head_VD is model.embedding_VD


def _run_in_two_chunks(
    model: TargetModel, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return logits and captured states by tap id; chunked, so the cache is read across calls."""
    taps = (-1, 0, model.num_layers - 2, model.num_layers - 1)
    paged = Paged(model.kv_specs, num_requests=1, max_length=len(ids))
    cut = 37
    outputs = [
        model.forward(
            paged.batch([Span(request=0, start=start, ids=part.tolist())]),
            paged.pool.layers,
            taps,
        )
        for start, part in ((0, ids[:cut]), (cut, ids[cut:]))
    ]
    logits = torch.cat([model.logits(out.hidden_ND) for out in outputs])
    aux = torch.cat([out.aux_hidden_NA for out in outputs if out.aux_hidden_NA is not None])
    return logits, dict(zip(taps, aux.chunk(len(taps), dim=1), strict=True))
