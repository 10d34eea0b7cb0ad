"""Every form of a map reads back to the same ids, in other libraries too, and is reproducible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.checkpoint import digest_file, write_safetensors
from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap import files, read_token_map, writing
from specctl.tokenmap.writing import write_token_map

IDS = (0, 2, 3, 70_000, 131_000)
SIZE = 131_072


def write(directory: Path, ids: tuple[int, ...] = IDS) -> dict[str, Path]:
    paths = write_token_map(directory, ids, target_vocab_size=SIZE, provenance={"b": 1, "a": [2]})
    return {path.name: path for path in paths}


def test_every_form_reads_back(tmp_path: Path) -> None:
    paths = write(tmp_path / "new" / "map")
    assert sorted(paths) == sorted(p.name for p in (tmp_path / "new" / "map").iterdir())
    for name in (files.JSON_FILE, files.PT_FILE, files.SAFETENSORS_FILE):
        assert read_token_map(paths[name], target_vocab_size=SIZE) == IDS
    assert json.loads(paths[files.JSON_FILE].read_text()) == list(IDS)
    stored = json.loads(paths[files.PROVENANCE_FILE].read_text())
    digests = stored.pop("files")
    assert stored == {"a": [2], "b": 1}
    assert digests == {
        name: digest_file(path, where=name)
        for name, path in paths.items()
        if name != files.PROVENANCE_FILE
    }


def test_bytes_are_reproducible(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    for name, path in first.items():
        assert path.read_bytes() == second[name].read_bytes()


def test_torch_reads_the_pt_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch reads the file that was written without it")
    path = write(tmp_path)[files.PT_FILE]
    assert torch.load(path, weights_only=True) == list(IDS)
    long = tuple(range(100_000))
    assert torch.load(write(tmp_path, long)[files.PT_FILE], weights_only=True) == list(long)


def test_the_official_reader_sees_offsets_and_mask(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="official reader")
    tensors = safetensors.load_file(write(tmp_path)[files.SAFETENSORS_FILE])
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (str(d2t.dtype), str(t2d.dtype)) == ("torch.int64", "torch.bool")
    assert tuple(i + int(o) for i, o in enumerate(d2t)) == IDS
    assert tuple(t2d.nonzero().flatten().tolist()) == IDS
    assert t2d.shape == (SIZE,)


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "stream_safetensors", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "new" / "map")
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_old_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: path.read_bytes() for name, path in write(tmp_path).items()}

    def stop(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "atomic_write", stop)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, (1, 2))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def codes_of(path: Path, target_vocab_size: int | None = SIZE) -> list[tuple[str, str]]:
    with pytest.raises(DiagnosticError) as caught:
        read_token_map(path, target_vocab_size=target_vocab_size)
    return [(d.code, d.where) for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("[0, 131072]", "SD402", "m.json#/1"),
        ("[0, -1]", "SD402", "m.json#/1"),
        ("[5, 3, 5]", "SD404", "m.json#/2"),
        ("[]", "SD420", "m.json"),
        ("{}", "SD420", "m.json"),
        ("[1, true]", "SD420", "m.json"),
        ("[1, 2.0]", "SD420", "m.json"),
        ("[1,", "SD420", "m.json"),
        ("[" * 100_000, "SD420", "m.json"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, code: str, where: str) -> None:
    (tmp_path / "m.json").write_text(text)
    assert codes_of(tmp_path / "m.json") == [(code, where)]


def test_all_problems_are_reported(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("[1, 1, -5, 999999]")
    assert codes_of(tmp_path / "m.json") == [("SD402", "m.json#/2"), ("SD404", "m.json#/1")]


def test_a_map_of_another_target_is_one_finding_with_range_and_count(tmp_path: Path) -> None:
    ids = [0, *range(60, 100), 7, 7, 7]
    (tmp_path / "m.json").write_text(json.dumps(ids))
    with pytest.raises(DiagnosticError) as caught:
        read_token_map(tmp_path / "m.json", target_vocab_size=64)
    outside, again = caught.value.diagnostics
    assert (outside.code, outside.where) == ("SD402", "m.json#/5")
    assert outside.message == (
        "36 of 44 entries lie outside the vocabulary, ids 64 to 99; the first is entry 5, id 64"
    )
    assert (outside.expected, outside.found) == ("0 to 63", "64 to 99")
    assert (again.code, again.where) == ("SD404", "m.json#/42")
    assert "2 of 44 entries" in again.message


def test_order_is_kept_and_size_may_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("[900000, 3, 1]")
    assert read_token_map(tmp_path / "m.json") == (900000, 3, 1)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("1\n2\n")
    assert codes_of(tmp_path / "m.txt") == [("SD420", "m.txt")]
    assert codes_of(tmp_path / "absent.json") == [("SD135", "absent.json")]
    assert codes_of(tmp_path / "absent.pt") == [("SD135", "absent.pt")]
    assert codes_of(tmp_path / "absent.safetensors") == [("SD135", "absent.safetensors")]
    (tmp_path / "m.safetensors").write_bytes(b"GGUF" + bytes(60))
    assert codes_of(tmp_path / "m.safetensors") == [("SD106", "m.safetensors")]


def test_safetensors_without_or_with_a_wrong_map(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"x": ("I64", (1,), bytes(8))})
    assert codes_of(path) == [("SD420", "m.safetensors")]
    write_safetensors(path, {"d2t": ("F32", (2,), bytes(8))})
    assert codes_of(path) == [("SD420", "m.safetensors")]
    write_safetensors(path, {"d2t": ("I64", (2,), bytes(16)), "t2d": ("BOOL", (3,), b"\1\0\1")})
    assert codes_of(path) == [("SD405", "m.safetensors::t2d[3 BOOL]")]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=1, max_size=50, unique=True))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    directory = tmp_path_factory.mktemp("map")
    for path in write_token_map(directory, ids, target_vocab_size=1000, provenance={})[:3]:
        assert read_token_map(path, target_vocab_size=1000) == tuple(ids)
