"""What loads: dtypes, shards, shared and own tensors, maps."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.loading import read_draft, read_target
from runtime.loading.files import WeightFiles
from runtime.loading.target_keys import target_keys
from runtime.models import target_shapes
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import Manifest, Vocabulary
from specctl.contract.vocabulary_map import map_digest
from tests.tiny import VOCAB_SIZE, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import CPU, load_tiny, tiny_manifest
from tests.tiny_pair import Pair, edit_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_converted_to_the_dtype(pair: Pair, dtype: torch.dtype) -> None:
    models = load_tiny(pair.manifest(), dtype=dtype)
    stored = load_file(pair.target / "model.safetensors")
    layer = models.target.layers[1]
    assert models.target.dtype == dtype
    assert torch.equal(
        layer.mlp.down_weight, stored["model.layers.1.mlp.down_proj.weight"].to(dtype)
    )
    assert torch.equal(models.target.norm_D, stored["model.norm.weight"].to(dtype))
    q, k, v = (stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(layer.attention.qkv_weight, torch.cat((q, k, v)).to(dtype))
    gate, up = (stored[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(layer.mlp.gate_up_weight[0::2], gate.to(dtype))
    assert torch.equal(layer.mlp.gate_up_weight[1::2], up.to(dtype))
    assert models.draft is not None
    assert models.draft.fusion.weight.dtype == dtype
    assert models.draft.draft_to_target_R.dtype == torch.int64
    assert models.diagnostics == ()


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    one = write_tiny_target(tmp_path / "one")
    many = write_tiny_target(tmp_path / "many", num_shards=3)
    first, second = (load_tiny(tiny_manifest(path)).target for path in (one, many))
    assert torch.equal(first.head_VD, second.head_VD)
    for a, b in zip(first.layers, second.layers, strict=True):
        assert torch.equal(a.attention.qkv_weight, b.attention.qkv_weight)


def test_pickle_files_load_like_safetensors(pair: Pair, tmp_path: Path) -> None:
    tensors = load_file(pair.target / "model.safetensors")
    expected = load_tiny(pair.manifest(), with_draft=False).target
    torch.save(tensors, pair.target / "pytorch_model.bin")
    manifest = pair.manifest()
    file = msgspec.structs.replace(manifest.target.files[0], file="pytorch_model.bin")
    manifest = msgspec.structs.replace(
        manifest, target=msgspec.structs.replace(manifest.target, files=(file,))
    )
    model, _ = read_target(manifest, tmp_path, device=CPU, dtype=torch.float32)
    assert torch.equal(model.embedding_VD, expected.embedding_VD)
    assert torch.equal(model.layers[0].mlp.down_weight, expected.layers[0].mlp.down_weight)


def test_reading_copies(pair: Pair) -> None:
    with WeightFiles(pair.target, ["model.safetensors"], device=CPU) as files:
        value = files.read("model.norm.weight")
        value.zero_()
        assert bool(files.read("model.norm.weight").ne(0).all())


def test_without_draft_its_files_are_not_needed(pair: Pair) -> None:
    manifest = pair.manifest()
    (pair.draft / "model.safetensors").unlink()
    models = load_tiny(manifest, with_draft=False)
    assert models.draft is None
    assert models.target.num_layers == 2


def test_stage_without_target_reads_the_shared_embedding_from_its_files(pair: Pair) -> None:
    manifest = pair.manifest()
    shared = load_tiny(manifest)
    alone, _ = read_draft(manifest, Path("/"), target=None, device=CPU, dtype=torch.float32)
    assert torch.equal(alone.embedding_VH, shared.target.embedding_VD)
    assert alone.embedding_VH is not shared.target.embedding_VD


def test_own_embedding_wins_over_the_target(pair: Pair, tmp_path: Path) -> None:
    draft = write_tiny_eagle3(
        tmp_path / "own", pair.target, has_own_embedding=True, boundary_ids=(0, 1, 2)
    )
    models = load_tiny(tiny_manifest(pair.target, draft))
    stored = load_file(draft / "model.safetensors")["embed_tokens.weight"]
    assert models.draft is not None
    assert torch.equal(models.draft.embedding_VH, stored.float())


def test_borrowed_head_is_a_row_subset_of_the_target(pair: Pair) -> None:
    edit_tensors(pair.draft, lambda tensors: tensors.pop("lm_head.weight"))
    models = load_tiny(pair.manifest())
    draft = models.draft
    assert draft is not None
    assert torch.equal(draft.head_RH, models.target.head_VD[draft.draft_to_target_R])


@pytest.mark.parametrize("suffix", [".json", ".pt", ".safetensors"])
def test_token_map_files_pick_rows_of_a_full_head(pair: Pair, tmp_path: Path, suffix: str) -> None:
    draft_dir = write_tiny_eagle3(
        tmp_path / "full", pair.target, draft_vocab_size=None, boundary_ids=(0, 1, 2)
    )
    ids = [2, 50, 7, 90, 11]  # any order
    path = tmp_path / f"map{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(ids))
    elif suffix == ".pt":
        torch.save(ids, path)
    else:
        save_file({"d2t": torch.tensor(ids) - torch.arange(5)}, path)
    draft = load_tiny(_with_token_map(tiny_manifest(pair.target, draft_dir), path, ids)).draft
    assert draft is not None
    assert draft.draft_to_target_R.tolist() == ids
    head = load_file(draft_dir / "model.safetensors")["lm_head.weight"].float()
    assert torch.equal(draft.head_RH, head[ids])


def test_target_keys_are_those_of_the_format_reader(pair: Pair) -> None:
    """The runtime cannot import the format's name table; it must not drift from it."""
    from specctl.formats.huggingface import NAMES

    target = pair.manifest().target
    decoder = msgspec.structs.replace(
        target.decoder, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True, has_qk_norm=True
    )
    roles = target_shapes(msgspec.structs.replace(target, decoder=decoder))
    keys = target_keys(target, roles)
    assert {role: NAMES.key_of(role) for role in roles} == keys


def _with_token_map(manifest: Manifest, path: Path, ids: list[int]) -> Manifest:
    vocabulary = Vocabulary(
        target_vocab_size=VOCAB_SIZE,
        draft_vocab_size=len(ids),
        map_kind="reduced",
        map_tensor=None,
        map_digest=map_digest(ids),
        token_map_file=str(path),
        token_map_digest=digest_bytes(path.read_bytes()),
        forced_ids=(2,),
    )
    return msgspec.structs.replace(manifest, vocabulary=vocabulary)
