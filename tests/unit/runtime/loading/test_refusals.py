"""What does not load, and with which code, place and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.loading.files import WeightFiles
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.manifest import Decoder, Manifest, Rope
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import CPU, load_tiny, tensor_refs, tiny_manifest
from tests.tiny_pair import Edit, Pair, edit_tensors


def refusal(manifest: Manifest) -> Diagnostic:
    """Return the only diagnostic that loading raises."""
    with pytest.raises(DiagnosticError) as caught:
        load_tiny(manifest)
    (found,) = caught.value.diagnostics
    return found


def drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("target", "model.layers.1.mlp.up_proj.weight"),
        ("target", "model.norm.weight"),
        ("draft", "fc.weight"),
        ("draft", "layers.0.hidden_norm.weight"),
    ],
)
def test_missing_tensor(pair: Pair, part: str, name: str) -> None:
    edit_tensors(getattr(pair, part), drop(name))
    found = refusal(pair.manifest())
    assert found.code == "SD501"
    assert name.removesuffix(".weight").rsplit(".", 1)[-1] in found.where


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("target", "model.layers.0.self_attn.k_proj.weight"),
        ("draft", "fc.weight"),
        ("draft", "lm_head.weight"),
    ],
)
def test_wrong_shape_names_both(pair: Pair, part: str, name: str) -> None:
    directory = getattr(pair, part)
    shape = load_file(directory / "model.safetensors")[name].shape
    edit_tensors(directory, put(name, torch.zeros(shape[0] + 1, shape[1], dtype=torch.bfloat16)))
    found = refusal(pair.manifest())
    assert found.code == "SD503"
    assert name in found.where
    assert found.expected == str(list(shape))
    assert found.found == str([shape[0] + 1, shape[1]])


def test_all_problems_of_a_file_come_together(pair: Pair) -> None:
    edit_tensors(pair.target, drop("model.norm.weight"))
    edit_tensors(pair.target, put("model.layers.0.input_layernorm.weight", torch.zeros(3)))
    with pytest.raises(DiagnosticError) as caught:
        load_tiny(pair.manifest())
    assert sorted(d.code for d in caught.value.diagnostics) == ["SD501", "SD503"]


@pytest.mark.parametrize("part", ["target", "draft"])
def test_left_over_tensor_is_reported(pair: Pair, part: str) -> None:
    edit_tensors(getattr(pair, part), put("adapter.weight", torch.zeros(2, 2)))
    (found,) = load_tiny(pair.manifest()).diagnostics
    assert found.code == "SD502"
    assert found.severity == "warning"
    assert "adapter.weight" in found.where


def test_rotary_buffers_are_known(pair: Pair) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(pair.target, put(name, torch.zeros(4)))
    assert load_tiny(pair.manifest()).diagnostics == ()


def test_quantised_weight(pair: Pair) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    shape = load_file(pair.target / "model.safetensors")[name].shape
    edit_tensors(pair.target, put(name, torch.zeros(shape, dtype=torch.int8)))
    found = refusal(pair.manifest())
    assert (found.code, found.found) == ("SD508", "I8")


def test_header_that_changed_after_the_manifest(pair: Pair) -> None:
    manifest = pair.manifest()
    edit_tensors(pair.target, put("adapter.weight", torch.zeros(2, 2)))
    assert refusal(manifest).code == "SD702"


def test_config_that_changed_after_the_manifest(pair: Pair) -> None:
    manifest = pair.manifest()
    config = pair.target / "config.json"
    config.write_text(config.read_text() + "\n")
    found = refusal(manifest)
    assert found.code == "SD702"
    assert "config.json" in found.where


def test_missing_file(pair: Pair) -> None:
    manifest = pair.manifest()
    (pair.draft / "model.safetensors").unlink()
    assert refusal(manifest).code == "SD712"


def test_map_with_other_ids(pair: Pair) -> None:
    """Same shapes and header, other numbers: only the map's digest can tell."""
    manifest = pair.manifest()
    d2t = load_file(pair.draft / "model.safetensors")["d2t"]
    d2t[-1] -= 1
    edit_tensors(pair.draft, put("d2t", d2t))
    found = refusal(manifest)
    assert found.code == "SD702"
    assert "d2t" in found.where
    assert found.expected == manifest.vocabulary.map_digest


def test_mask_of_other_ids(pair: Pair) -> None:
    mask = load_file(pair.draft / "model.safetensors")["t2d"]
    edit_tensors(pair.draft, put("t2d", mask.roll(1)))
    found = refusal(pair.manifest())
    assert found.code == "SD405"
    assert "t2d" in found.where


def test_map_beyond_the_target_vocabulary(pair: Pair) -> None:
    d2t = load_file(pair.draft / "model.safetensors")["d2t"]
    d2t[5] = 1000
    edit_tensors(pair.draft, put("d2t", d2t))
    found = refusal(pair.manifest())
    assert (found.code, found.found) == ("SD402", "1005")


@pytest.mark.parametrize("algorithm", ["medusa"])
def test_other_algorithms_name_what_runs(pair: Pair, algorithm: str) -> None:
    manifest = pair.manifest()
    assert manifest.draft is not None
    draft = msgspec.structs.replace(manifest.draft, algorithm=algorithm)
    found = refusal(msgspec.structs.replace(manifest, draft=draft))
    assert (found.code, found.found) == ("SD810", algorithm)
    assert "eagle3" in str(found.expected)
    assert "dspark" in str(found.expected)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rope": Rope(theta=1e4, kind="dynamic", parameters={"factor": 2.0})}, "SD811"),
        ({"rope": Rope(theta=1e4, kind="linear")}, "SD812"),
        ({"hidden_act": "gelu"}, "SD813"),
        ({"layer_types": ("full_attention", "chunked_attention")}, "SD814"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "SD814"),
    ],
)
def test_facts_without_arithmetic(pair: Pair, changes: dict[str, Any], code: str) -> None:
    manifest = pair.manifest()
    found = refusal(_with_decoder(manifest, **changes))
    assert found.code == code
    assert found.where.startswith("manifest#/target/decoder/")


def test_draft_facts_are_checked_too(pair: Pair) -> None:
    manifest = pair.manifest()
    assert manifest.draft is not None
    decoder = msgspec.structs.replace(manifest.draft.decoder, hidden_act="relu")
    draft = msgspec.structs.replace(manifest.draft, decoder=decoder)
    found = refusal(msgspec.structs.replace(manifest, draft=draft))
    assert (found.code, found.where) == ("SD813", "manifest#/draft/decoder/hidden_act")


def test_embedding_key_without_prefix(pair: Pair) -> None:
    edit_tensors(pair.target, put("tok_embeddings.weight", torch.zeros(104, 32)))
    manifest = pair.manifest()
    embedding = tensor_refs(pair.target)["tok_embeddings.weight"]
    target = msgspec.structs.replace(manifest.target, embedding=embedding)
    found = refusal(msgspec.structs.replace(manifest, target=target))
    assert (found.code, found.found) == ("SD815", "tok_embeddings.weight")


def test_stored_head_beside_a_tied_one(tmp_path: Path) -> None:
    directory = write_tiny_target(tmp_path, num_layers=1, is_tied=True)
    tensors = load_file(directory / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    edit_tensors(directory, put("lm_head.weight", copy))
    model = load_tiny(tiny_manifest(directory)).target
    assert model.head_VD is model.embedding_VD
    edit_tensors(directory, put("lm_head.weight", copy + 1))
    assert refusal(tiny_manifest(directory)).code == "SD816"


def test_shared_embedding_of_another_width(pair: Pair, tmp_path: Path) -> None:
    draft = write_tiny_eagle3(
        tmp_path / "narrow", pair.target, hidden_size=16, boundary_ids=(0, 1, 2)
    )
    found = refusal(tiny_manifest(pair.target, draft))
    assert found.code == "SD509"
    assert "16" in found.message
    assert "32" in found.message


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("model.safetensors", b"\xff" * 64, "SD101"),
        ("model.safetensors", b"", "SD101"),
        ("model.bin", b"not a zip archive", "SD132"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DiagnosticError) as caught:
        WeightFiles(tmp_path, [name], device=CPU)
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        WeightFiles(tmp_path, ["model.safetensors"], device=CPU)
    assert caught.value.diagnostics[0].code == "SD135"


def test_pickle_that_would_execute_code_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": print}, tmp_path / "model.bin")
    with pytest.raises(DiagnosticError) as caught:
        WeightFiles(tmp_path, ["model.bin"], device=CPU)
    assert caught.value.diagnostics[0].code == "SD132"


def test_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(DiagnosticError) as caught:
        WeightFiles(tmp_path, ["a.safetensors", "b.safetensors"], device=CPU)
    (found,) = caught.value.diagnostics
    assert found.code == "SD104"
    assert found.found == "a.safetensors and b.safetensors"


def _with_decoder(manifest: Manifest, **changes: Any) -> Manifest:
    decoder: Decoder = msgspec.structs.replace(manifest.target.decoder, **changes)
    target = msgspec.structs.replace(manifest.target, decoder=decoder)
    return msgspec.structs.replace(manifest, target=target)


def test_a_tensor_described_otherwise_than_stored(pair: Pair) -> None:
    manifest = pair.manifest()
    assert manifest.draft is not None
    fc = msgspec.structs.replace(manifest.draft.tensors["fc.weight"], dtype="F16")
    tensors = {**manifest.draft.tensors, "fc.weight": fc}
    draft = msgspec.structs.replace(manifest.draft, tensors=tensors)
    found = refusal(msgspec.structs.replace(manifest, draft=draft))
    assert (found.code, found.where) == ("SD710", "manifest#/draft/tensors/fc.weight")
    assert "BF16" in str(found.expected)
    assert "F16" in str(found.found)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("target", "model.embed_tokens.weight"),
        ("target", "model.layers.1.self_attn.q_proj.weight"),
        ("target", "lm_head.weight"),
        ("draft", "fc.weight"),
        ("draft", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(pair: Pair, part: str, name: str, value: float) -> None:
    """One NaN makes every logit NaN; greedy decoding would answer with id 0 for ever."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    edit_tensors(getattr(pair, part), spoil)
    found = refusal(pair.manifest())
    assert found.code == "SD817"
    assert f"::{name}[" in found.where
    assert str(found.found).startswith("1 of ")


@pytest.mark.parametrize(
    "name",
    ["norm.weight", "layers.0.mlp.down_proj.weight", "embed_tokens.weight", "lm_head.weight"],
)
def test_a_weight_of_zeros_is_said_at_load(name: str, tmp_path: Path) -> None:
    """Such a draft runs, and no token of it is ever accepted."""
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    draft = write_tiny_eagle3(
        tmp_path / "draft", target, boundary_ids=(0, 1, 2), has_own_embedding=True
    )
    edit_tensors(draft, lambda tensors: tensors.update({name: tensors[name] * 0}))
    found = load_tiny(tiny_manifest(target, draft)).diagnostics
    assert [(d.code, d.severity) for d in found] == [("SD521", "warning")]
    assert f"::{name}" in found[0].where


def test_other_rows_of_padding_than_the_targets_load(tmp_path: Path) -> None:
    """C045: a draft may count 64 ids where the target's matrices end at 72."""
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    draft = write_tiny_eagle3(
        tmp_path / "draft", target, boundary_ids=(0, 1, 2), has_own_embedding=True
    )

    def pad(tensors: dict[str, torch.Tensor]) -> None:
        rows, mask = tensors["embed_tokens.weight"], tensors["t2d"]
        tensors["embed_tokens.weight"] = torch.cat([rows, rows[:4]])
        last = int(mask.nonzero().max()) + 1
        tensors["t2d"] = mask[:last]

    expected = load_tiny(tiny_manifest(target, draft)).draft
    edit_tensors(draft, pad)
    found = load_tiny(tiny_manifest(target, draft)).draft
    assert found is not None
    assert expected is not None
    assert torch.equal(found.draft_to_target_R, expected.draft_to_target_R)
