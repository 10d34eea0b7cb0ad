"""Models on CUDA: ladder steps 2 and 3 in bf16 and fp16, and closeness to the CPU twin in fp32.

Needs torch, triton, safetensors, msgspec, tokenizers and pytest only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.models import TargetModel
from tests.invariance import (
    MOST,
    RESIDUAL_LINEAR,
    SMOLLM2,
    draft_mismatches,
    layer_mismatches,
    prefill_mismatches,
    random_ids,
    row_dependent_residual_linear,
    verify_mismatches,
)
from tests.paged import Paged, Span
from tests.tiny import Family, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import CPU, load_tiny, tiny_manifest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
VOCAB_SIZE = 49152
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-biases": ("llama", {"has_attention_bias": True, "has_mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen3-tied": ("qwen3", {"is_tied": True}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Four layers of SmolLM2's shape with its whole vocabulary, and an EAGLE-3 draft."""
    root = tmp_path_factory.mktemp("gpu")
    target = write_tiny_target(root / "target", sizes=SMOLLM2, vocab_size=VOCAB_SIZE)
    return target, write_tiny_eagle3(root / "draft", target, num_layers=2)


def load_target(directory: Path, dtype: torch.dtype) -> TargetModel:
    """Load with the whole head in reach, so that its real shape is multiplied."""
    manifest = tiny_manifest(directory)
    target = msgspec.structs.replace(manifest.target, tokenizer_size=None)
    manifest = msgspec.structs.replace(manifest, target=target)
    return load_tiny(manifest, device=CUDA, dtype=dtype).target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_equal_single_steps(directories: tuple[Path, Path], dtype: torch.dtype) -> None:
    model = load_target(directories[0], dtype)
    assert verify_mismatches(model, prefix=29, row_counts=range(1, MOST + 1)) == []


@pytest.mark.parametrize("prefix", [250, 400])
def test_verify_rows_with_longer_context(directories: tuple[Path, Path], prefix: int) -> None:
    model = load_target(directories[0], torch.bfloat16)
    counts = (1, 2, 3, 5, 9, 16, 17, 33, MOST)
    assert verify_mismatches(model, prefix=prefix, row_counts=counts) == []


def test_prefill_rows_equal_single_steps(directories: tuple[Path, Path]) -> None:
    model = load_target(directories[0], torch.bfloat16)
    assert prefill_mismatches(model, chunks=(5, 16, 64, 100, 150), length=150) == []


def test_free_blocks_may_hold_nan(directories: tuple[Path, Path]) -> None:
    model = load_target(directories[0], torch.bfloat16)
    counts = (1, 5, 17)
    assert verify_mismatches(model, prefix=29, row_counts=counts, is_poisoned=True) == []


def test_draft_rows_equal_single_entries(directories: tuple[Path, Path]) -> None:
    draft = load_tiny(tiny_manifest(*directories), device=CUDA, dtype=torch.bfloat16).draft
    assert draft is not None
    assert draft_mismatches(draft, chunks=(2, 5, 16, 17, 33, MOST)) == []


def test_greedy_ids_are_the_argmax_of_logits(directories: tuple[Path, Path]) -> None:
    model = load_target(directories[0], torch.bfloat16)
    hidden = torch.randn(MOST, SMOLLM2.hidden, generator=torch.Generator().manual_seed(4))
    hidden = hidden.to(device=CUDA, dtype=torch.bfloat16)
    assert torch.equal(model.greedy_ids(hidden), model.logits(hidden).argmax(dim=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_of_real_size_is_row_invariant(dtype: torch.dtype) -> None:
    assert layer_mismatches(dtype, CUDA, row_counts=range(1, MOST + 1)) == []


def test_negative_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a K split that follows M the same comparison finds differing rows."""
    monkeypatch.setattr(RESIDUAL_LINEAR, row_dependent_residual_linear)
    assert layer_mismatches(torch.bfloat16, CUDA, row_counts=range(1, MOST + 1)) != []


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize(("dtype", "mean", "most"), [(DTYPES[0], 0.1, 1.0), (DTYPES[1], 0.02, 0.2)])
def test_tiny_models_are_close_to_the_cpu(
    case: str, dtype: torch.dtype, mean: float, most: float, tmp_path: Path
) -> None:
    """Logits are of magnitude 15-30; tolerances allow some roundings to 8 or 11 bits."""
    family, options = FAMILIES[case]
    manifest = tiny_manifest(write_tiny_target(tmp_path, family, **options))
    expected = _logits(load_tiny(manifest, device=CPU, dtype=torch.float32).target)
    found = _logits(load_tiny(manifest, device=CUDA, dtype=dtype).target).cpu()
    size = manifest.target.tokenizer_size
    error = (found - expected)[:, :size].abs()
    assert float(error.mean()) < mean
    assert float(error.max()) < most
    top = expected.topk(2, dim=1).values
    is_clear = top[:, 0] - top[:, 1] > 2 * most
    assert torch.equal(found.argmax(dim=1)[is_clear], expected.argmax(dim=1)[is_clear])


def _logits(model: TargetModel) -> torch.Tensor:
    ids = random_ids(80, seed=8)
    paged = Paged(
        model.kv_specs, num_requests=1, max_length=80, dtype=model.dtype, device=model.device
    )
    out = model.forward(paged.batch([Span(request=0, start=0, ids=ids)]), paged.pool.layers)
    return model.logits(out.hidden_ND)
