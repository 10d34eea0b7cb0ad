"""An interrupted download is told apart from a complete one and from a broken checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from container_files import codes, safetensors_bytes, table

from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import DiagnosticError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_shards(root: Path, *names: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text("{}")
    index = {"weight_map": {name[:11]: name for name in SHARDS}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        (root / name).write_bytes(safetensors_bytes(*table(name[:11])))


@pytest.mark.parametrize(
    "left",
    [
        SHARDS[1] + ".incomplete",
        ".cache/huggingface/download/abc.def.incomplete",
        "._____temp/" + SHARDS[1],
        SHARDS[1] + ".aria2",
        SHARDS[1] + ".part",
    ],
)
def test_a_missing_shard_and_a_part_of_it(tmp_path: Path, left: str) -> None:
    write_shards(tmp_path, SHARDS[0])
    assert codes(open_checkpoint(tmp_path)) == ["SD102"]
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_bytes(b"part")
    found = open_checkpoint(tmp_path)
    assert codes(found) == ["SD102", "SD148"]
    assert Path(left).name in found.diagnostics[1].where


def test_what_an_old_download_left_beside_a_complete_one(tmp_path: Path) -> None:
    write_shards(tmp_path, *SHARDS)
    (tmp_path / ".cache/huggingface/download").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/download/x.incomplete").write_bytes(b"")
    assert codes(open_checkpoint(tmp_path)) == []


def test_a_snapshot_of_the_cache_says_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    write_shards(snapshot, *SHARDS)
    assert open_checkpoint(snapshot).revision == COMMIT
    write_shards(snapshot / "drafts" / "eagle", *SHARDS)
    assert open_checkpoint(snapshot / "drafts" / "eagle").revision == COMMIT
    write_shards(tmp_path / "elsewhere", *SHARDS)
    assert open_checkpoint(tmp_path / "elsewhere").revision is None


def test_a_snapshot_whose_blob_is_unfinished(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    write_shards(snapshot, SHARDS[0])
    blobs.mkdir()
    (blobs / "feed.incomplete").write_bytes(b"part")
    assert codes(open_checkpoint(snapshot)) == ["SD102", "SD148"]
    (snapshot / SHARDS[1]).symlink_to(blobs / "feed")  # a link to what never came
    assert codes(open_checkpoint(snapshot)) == ["SD102", "SD148"]


def test_links_of_a_subfolder_into_the_blobs_are_inside(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / COMMIT / "draft", repository / "blobs"
    write_shards(snapshot)
    blobs.mkdir()
    for name in SHARDS:
        (blobs / name[:11]).write_bytes(safetensors_bytes(*table(name[:11])))
        (snapshot / name).symlink_to(Path("../../..") / "blobs" / name[:11])
    assert codes(open_checkpoint(snapshot)) == []


def test_nothing_but_a_part(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.incomplete").write_bytes(b"part")
    with pytest.raises(DiagnosticError) as caught:
        open_checkpoint(tmp_path)
    assert [d.code for d in caught.value.diagnostics] == ["SD119", "SD148"]
