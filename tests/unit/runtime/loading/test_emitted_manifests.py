"""Manifests that `specctl` emits load, and state the facts that the tests write by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.contract.codec import dump_manifest, parse_manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.tiny import Family, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import load_tiny, tiny_manifest

CASES: dict[str, tuple[Family, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"has_attention_bias": True, "has_mlp_bias": True}, {}),
    "mistral": ("mistral", {"sliding_window": 20}, {"draft_vocab_size": None}),
    "qwen2": ("qwen2", {"sliding_window": 24}, {"has_own_embedding": True, "hidden_size": 16}),
    "qwen3": (
        "qwen3",
        {"is_tied": True, "num_shards": 2},
        {"family": "qwen3", "num_layers": 2, "has_fc_norm": True, "has_norm_output": True},
    ),
    "before-fc": ("llama", {}, {"has_norm_before_fc": True, "has_norm_before_residual": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_emitted_facts_equal_the_stated_ones(case: str, tmp_path: Path) -> None:
    family, target_options, draft_options = CASES[case]
    target = write_tiny_target(tmp_path / "target", family, **target_options)
    draft = write_tiny_eagle3(tmp_path / "draft", target, **draft_options)
    emitted = emit_manifest(
        str(target), str(draft), manifest_dir=tmp_path / "elsewhere", num_speculative_tokens=4
    )
    stated = tiny_manifest(target, draft)
    for section in ("target", "draft", "geometry", "vocabulary", "sharing", "sampling"):
        found, expected = getattr(emitted, section), getattr(stated, section)
        for field in found.__struct_fields__:
            assert getattr(found, field) == getattr(expected, field), f"{section}.{field}"


def test_emitted_manifest_loads_after_a_round_trip(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    draft = write_tiny_eagle3(tmp_path / "draft", target, boundary_ids=(0, 1, 2))
    emitted = emit_manifest(str(target), str(draft), manifest_dir=Path("/"))
    models = load_tiny(parse_manifest(dump_manifest(emitted), name="manifest.yaml"))
    expected = load_tiny(tiny_manifest(target, draft))
    assert models.draft is not None
    assert expected.draft is not None
    assert torch.equal(models.target.head_VD, expected.target.head_VD)
    assert torch.equal(models.draft.head_RH, expected.draft.head_RH)
    assert torch.equal(models.draft.draft_to_target_R, expected.draft.draft_to_target_R)


def test_pickle_target_loads(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    expected = load_tiny(tiny_manifest(target)).target
    weights = target / "model.safetensors"
    torch.save(load_file(weights), target / "pytorch_model.bin")
    weights.unlink()
    found = load_tiny(emit_manifest(str(target), None, manifest_dir=Path("/"))).target
    assert torch.equal(found.head_VD, expected.head_VD)
    assert torch.equal(found.layers[1].mlp.down_weight, expected.layers[1].mlp.down_weight)
