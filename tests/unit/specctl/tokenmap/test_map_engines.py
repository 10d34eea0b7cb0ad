"""The rules by which SGLang, vLLM and FR-Spec load a map, applied to the files that are written.

The rules are written out here from the engines' documentation and sources; no engine is imported.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap import files, read_token_map
from specctl.tokenmap.files import find_provenance, read_provenance
from specctl.tokenmap.pt_file import stream_pt_ints
from specctl.tokenmap.writing import write_token_map

IDS = (0, 2, 3, 700, 1310)
RANKED = (2, 1310, 0, 3, 700)
ROWS = 1320
ORIGIN = {"tokenizer_digest": "sha256:t", "tokenizer_size": 1311, "target_vocab_size": ROWS}

torch = pytest.importorskip("torch", reason="the engines read these files with torch")


@pytest.fixture
def built(tmp_path: Path) -> Path:
    write_token_map(
        tmp_path / "map", IDS, ids_by_rank=RANKED, target_vocab_size=ROWS, provenance=ORIGIN
    )
    return tmp_path / "map"


def sglang_hot_ids(path: Path) -> Any:
    """`--speculative-token-map`: a local `.pt`, weights only, made an int64 tensor as it is."""
    assert path.exists()
    return torch.tensor(torch.load(path, weights_only=True), dtype=torch.int64)


def vllm_ids(path: Path, end_ids: list[int], num_rows: int) -> list[int]:
    """`draft_token_map`: JSON list or `.pt` list or tensor; end ids added; in range; sorted."""
    loaded = (
        json.loads(path.read_text())
        if path.suffix == ".json"
        else torch.load(path, weights_only=True)
    )
    values = loaded.tolist() if isinstance(loaded, torch.Tensor) else loaded
    assert isinstance(values, list)
    assert all(type(value) is int for value in values)
    ids = sorted({*values, *end_ids})
    assert values
    assert 0 <= ids[0] <= ids[-1] < num_rows
    return ids


def test_sglang_takes_the_pt_lists(built: Path) -> None:
    head = torch.arange(ROWS * 2).reshape(ROWS, 2)
    hot = sglang_hot_ids(built / "token_map.pt")
    assert hot.tolist() == list(IDS)
    assert torch.equal(head[hot], torch.stack([head[i] for i in IDS]))
    assert sglang_hot_ids(built / "freq_5.pt").tolist() == list(RANKED)


def test_sglang_and_vllm_read_d2t_as_offsets(built: Path) -> None:
    tensors = pytest.importorskip("safetensors.torch", reason="official reader").load_file(
        built / files.SAFETENSORS_FILE
    )
    d2t = tensors["d2t"]
    assert (d2t + torch.arange(len(d2t))).tolist() == list(IDS)
    assert int(tensors["t2d"].sum()) == len(IDS)


@pytest.mark.parametrize("name", ["token_map.json", "token_map.pt", "freq_5.pt"])
def test_vllm_takes_json_and_pt_and_needs_to_add_nothing(built: Path, name: str) -> None:
    assert vllm_ids(built / name, [2], ROWS) == list(IDS)


def test_fr_spec_reads_a_plain_pickled_list_by_rank(built: Path) -> None:
    loaded = torch.load(built / "freq_5.pt", weights_only=True)
    assert type(loaded) is list
    assert loaded == list(RANKED)


def test_files_of_fr_spec_are_read_in_the_forms_that_torch_saves(tmp_path: Path) -> None:
    for number, value in enumerate((list(RANKED), torch.tensor(RANKED))):
        path = tmp_path / f"freq_{number}.pt"
        torch.save(value, path)
        assert read_token_map(path, target_vocab_size=ROWS) == RANKED
    torch.save(list(RANKED), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DiagnosticError):  # the form before torch 1.6 is said to be none
        read_token_map(tmp_path / "old.pt")


def test_nothing_in_a_pickle_is_executed(tmp_path: Path) -> None:
    import zipfile

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("executed",))

    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps([Evil()]))
        archive.writestr("m/version", "3\n")
    with pytest.raises(DiagnosticError) as caught:
        read_token_map(tmp_path / "m.pt")
    assert [d.code for d in caught.value.diagnostics] == ["SD103"]


def test_the_origin_lies_beside_every_file(built: Path) -> None:
    stored = read_provenance(built / files.PROVENANCE_FILE)
    assert stored is not None
    for path in built.iterdir():
        if path.name == files.PROVENANCE_FILE:
            continue
        found = find_provenance(path)
        assert found is not None
        assert found.tokenizer_digest == "sha256:t"
        assert stored.files[path.name] == digest_file(path, where=path.name)
    alone = built.parent / "m.safetensors"
    (built / files.SAFETENSORS_FILE).rename(alone)
    in_metadata = find_provenance(alone)
    assert in_metadata is not None
    assert (in_metadata.file, in_metadata.tokenizer_size) == ("m.safetensors", 1311)


@pytest.mark.parametrize("text", ["", "[", "[]", '{"files": 3}', "\xff"])
def test_a_broken_origin_is_none_and_no_crash(built: Path, text: str) -> None:
    (built / files.PROVENANCE_FILE).write_text(text, encoding="latin-1")
    assert find_provenance(built / files.JSON_FILE) is None


def test_a_smaller_map_takes_the_place_of_the_larger_one(built: Path) -> None:
    (built / "freq_99.pt").write_bytes(b"not ours")
    write_token_map(built, IDS[:3], ids_by_rank=IDS[:3], target_vocab_size=ROWS, provenance={})
    assert not (built / "freq_5.pt").exists()
    assert (built / "freq_99.pt").exists()  # a file that no map of ours lists stays
    with (built / "freq_3.pt").open("rb") as stream:
        assert torch.load(stream, weights_only=True) == list(IDS[:3])
    with (built.parent / "x.pt").open("wb") as stream:
        stream_pt_ints(stream, IDS)
    assert find_provenance(built.parent / "x.pt") is None
