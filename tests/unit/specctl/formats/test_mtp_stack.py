"""Several dense prediction layers in DeepSeek's layout: read, described, refused when broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.roles import MTP_LAYERS_ROLES, MTP_ROLES, roles_of_draft
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.load import load
from tests.tiny import write_tiny_target
from tests.tiny_last_state import write_mtp


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = write_tiny_target(tmp_path / "target")
    return target, write_mtp(tmp_path / "draft", target, num_layers=3)


def test_every_layer_is_described(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    manifest = emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    assert manifest.draft is not None
    assert manifest.draft.decoder.num_layers == 3
    keys = {role: ref.key for role, ref in manifest.draft.tensors.items()}
    for layer in range(3):
        assert keys[f"layers.{layer}.fc.weight"] == f"model.layers.{4 + layer}.eh_proj.weight"
        assert keys[f"layers.{layer}.norm"] == f"model.layers.{4 + layer}.shared_head.norm.weight"
    assert "fc.weight" not in keys


@pytest.mark.parametrize("name", ["eh_proj", "enorm", "self_attn.k_proj"])
def test_a_tensor_that_one_layer_lacks_is_named(pair: tuple[Path, Path], name: str) -> None:
    _, draft = pair
    key = f"model.layers.5.{name}.weight"
    tensors = load_file(draft / "model.safetensors")
    del tensors[key]
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    read = load(str(draft)).draft
    assert read is not None
    found = [d for d in read.diagnostics if d.severity == "error"]
    assert any(key in d.message + d.where for d in found), found


def test_a_layer_with_an_embedding_of_its_own_is_not_served(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    tensors = load_file(draft / "model.safetensors")
    tensors["model.layers.5.embed_tokens.weight"] = load_file(target / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DiagnosticError) as raised:
        emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    (found,) = [d for d in raised.value.diagnostics if d.code == "SD716"]
    assert "`layers.1.embedding`" in found.message


def test_one_layer_has_the_short_roles() -> None:
    assert roles_of_draft("mtp", 1) is MTP_ROLES
    assert roles_of_draft("mtp", 2) is MTP_LAYERS_ROLES
    assert roles_of_draft("medusa", 1) == ()
