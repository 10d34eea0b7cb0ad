"""Files that changed or vanished after the manifest was written."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from specctl.contract.codec import verify_digests
from specctl.contract.digests import header_digest
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import Manifest, WeightFile

replace = msgspec.structs.replace
_HEADER = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()


def write_weights(path: Path) -> WeightFile:
    path.write_bytes(len(_HEADER).to_bytes(8, "little") + _HEADER + b"abcd")
    return WeightFile(
        file=path.name, size_bytes=path.stat().st_size, header_digest=digest_bytes(_HEADER)
    )


@pytest.fixture
def recorded(manifest: Manifest, tmp_path: Path) -> Manifest:
    """The manifest with digests of files that exist below tmp_path."""
    sections = {}
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        sections[name] = replace(
            getattr(manifest, name),
            config_digest=digest_bytes(b"{}"),
            files=(write_weights(tmp_path / name / "model.safetensors"),),
        )
    (tmp_path / "map.json").write_text("[1]")
    vocabulary = replace(
        manifest.vocabulary, token_map_file="map.json", token_map_digest=digest_bytes(b"[1]")
    )
    return replace(manifest, **sections, vocabulary=vocabulary)


def test_unchanged_files_are_clean(recorded: Manifest, tmp_path: Path) -> None:
    assert verify_digests(recorded, tmp_path) == ()


def test_absolute_sources_do_not_need_the_directory(recorded: Manifest, tmp_path: Path) -> None:
    target = replace(recorded.target, source=str(tmp_path / "target"))
    (found, *_) = verify_digests(replace(recorded, target=target), Path("elsewhere"))
    assert found.where == "manifest#/draft/source"


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("draft/config.json", b"{ }"),
        ("map.json", b"[2]"),
        ("target/model.safetensors", b"short"),
        ("target/model.safetensors", None),
    ],
)
def test_changed_files(recorded: Manifest, tmp_path: Path, file: str, data: bytes | None) -> None:
    path = tmp_path / file
    old = path.read_bytes()
    path.write_bytes(old.replace(b"U8", b"I8") if data is None else data)
    (found,) = verify_digests(recorded, tmp_path)
    assert found.code == "SD702"
    assert found.where == f"{path}#"
    assert found.expected != found.found


@pytest.mark.parametrize("file", ["draft/config.json", "map.json", "target/model.safetensors"])
def test_missing_files(recorded: Manifest, tmp_path: Path, file: str) -> None:
    (tmp_path / file).unlink()
    (found,) = verify_digests(recorded, tmp_path)
    assert (found.code, found.found) == ("SD712", "nothing")


def test_zip_directory_is_the_header_of_a_torch_archive(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    digests = set()
    for data in (b"abc", b"abd"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo("x/data.pkl"), data)
        digests.add(header_digest(path))
    assert len(digests) == 2
    assert None not in digests
    path.write_bytes(path.read_bytes()[:-1])
    assert header_digest(path) is None


def test_header_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for data in (b"", b"\x00" * 8, b"\xff" * 16, (100).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        assert header_digest(path) is None
