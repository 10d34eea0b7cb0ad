"""Written files are whole or absent, deterministic, and readable by the official reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.checkpoint import (
    atomic_write,
    open_checkpoint,
    write_safetensors,
    write_text_atomic,
)

TENSORS = {
    "t2d": ("BOOL", (3,), b"\x01\x00\x01"),
    "d2t": ("I64", (2,), bytes(16)),
    "fc.weight": ("BF16", (2, 1), b"\x80\x3f\x00\x40"),
}


def test_round_trip_and_determinism(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", TENSORS, {"format": "pt", "a": "b"})
    write_safetensors(
        tmp_path / "again", dict(reversed(TENSORS.items())), {"a": "b", "format": "pt"}
    )
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "again").read_bytes()
    (tmp_path / "again").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.diagnostics == ()
    for key, (dtype, shape, data) in TENSORS.items():
        entry = checkpoint.tensors[key]
        assert (entry.dtype, entry.shape, checkpoint.read_bytes(key)) == (dtype, shape, data)
    assert checkpoint.tensors["d2t"].begin % 8 == 0


def test_official_reader_accepts_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="official reader")
    path = tmp_path / "x.safetensors"
    write_safetensors(path, TENSORS, {"format": "pt"})
    loaded = dict(safetensors.deserialize(path.read_bytes()))
    assert {k: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for k, v in loaded.items()} == (
        TENSORS
    )


@pytest.mark.parametrize("bad", [("I64", (2,), bytes(15)), ("X", (1,), b""), ("F4", (1,), b"0")])
def test_wrong_data_leaves_nothing(tmp_path: Path, bad: tuple[str, tuple[int, ...], bytes]) -> None:
    with pytest.raises(ValueError, match="`w`"):
        write_safetensors(tmp_path / "x.safetensors", {"w": bad})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_interrupted_write_keeps_the_old_file(tmp_path: Path, stop: type[BaseException]) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text("old")

    def interrupted() -> None:
        with atomic_write(path) as stream:
            stream.write(b"half")
            raise stop

    with pytest.raises(stop):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_replaces_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text("old")
    path.chmod(0o640)
    write_text_atomic(path, "n\u00e9w")
    assert path.read_bytes() == "n\u00e9w".encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_new_file_follows_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        write_text_atomic(tmp_path / "new", "x")
    finally:
        os.umask(previous)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_missing_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text_atomic(tmp_path / "absent" / "x", "")
