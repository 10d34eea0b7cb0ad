"""Every defect of a safetensors file has its own code, place and numbers."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from container_files import codes, entry, only, safetensors_bytes, table

from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.contract.diagnostics import DiagnosticError

Open = Callable[..., Checkpoint]


def test_sound_file_has_absolute_ranges_and_header_digest(single: Open) -> None:
    header, data = table("a", "b")
    checkpoint = single({"__metadata__": {"format": "pt"}, **header}, data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    assert checkpoint.diagnostics == ()
    assert (checkpoint.container, checkpoint.layout) == ("safetensors", "single")
    assert set(checkpoint.tensors) == {"a", "b"}
    b = checkpoint.tensors["b"]
    assert (b.begin, b.end, b.nbytes) == (8 + len(text) + 8, 8 + len(text) + 16, 8)
    assert b.describe() == "model.safetensors::b[2 F32]"
    assert checkpoint.read_bytes("b") == bytes(range(8))
    (record,) = checkpoint.files
    assert record.header_digest == "sha256:" + hashlib.sha256(text).hexdigest()
    assert record.size_bytes == 8 + len(text) + 16


def test_empty_and_scalar_tensors_are_sound(single: Open) -> None:
    header = {"none": entry("F32", [0, 4], 0, 0), "one": entry("BF16", [], 0, 2)}
    checkpoint = single(header, b"\x80\x3f")
    assert checkpoint.diagnostics == ()
    assert checkpoint.read_bytes("none") == b""
    assert checkpoint.tensors["one"].shape == ()


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"", "0 bytes"),
        (b"\x10\x00", "2 bytes"),
        (safetensors_bytes({"a": 1})[:-3], "5 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "9223372036854775808"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "100000001"),
        ((1).to_bytes(8, "little") + b"{}", "1"),
        (safetensors_bytes(b"[1, 2]"), "0x5b"),
        (safetensors_bytes(b'{"a": '), None),
        (safetensors_bytes(b'{"a": "\xff"}'), None),
        (safetensors_bytes(b'{"a":' * 100_000), None),
        (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}"), None),
        (safetensors_bytes(b'{"\\ud800": 1}'), None),
    ],
)
def test_unreadable_header_is_sd101(single: Open, raw: bytes, found: str | None) -> None:
    diagnostic = only(single(raw))
    assert diagnostic.code == "SD101"
    assert diagnostic.where == "model.safetensors"
    assert found is None or found in str(diagnostic.found)


def test_header_length_is_never_allocated(single: Open, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes((99_000_000).to_bytes(8, "little") + b'{"a": 1}')
    tracemalloc.start()
    open_checkpoint(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 19732384\n",
            "SD105",
            "19732384 bytes",
        ),
        (b"<!DOCTYPE html><html><body>404</body></html>", "SD106", "HTML"),
        (b"\n\n<HTML>\n", "SD106", "HTML"),
        (b'{"error": "Repository not found"}', "SD106", "JSON"),
        (b"PK\x03\x04" + b"\x00" * 60, "SD106", "zip"),
        (b"GGUF\x03\x00\x00\x00" + b"\x01" * 60, "SD106", "GGUF"),
        (b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01u.", "SD106", "pickle"),
        (bytes(4096), "SD107", "zero"),
    ],
)
def test_foreign_content_is_named(single: Open, raw: bytes, code: str, words: str) -> None:
    diagnostic = only(single(raw))
    assert diagnostic.code == code
    assert words in f"{diagnostic.message} {diagnostic.expected} {diagnostic.found}"


def test_duplicate_header_key_is_sd116(single: Open) -> None:
    one = json.dumps(entry("F32", [2], 0, 8))
    checkpoint = single(f'{{"a": {one}, "a": {one}}}'.encode(), bytes(8))
    diagnostic = only(checkpoint)
    assert (diagnostic.code, diagnostic.where) == ("SD116", "model.safetensors#a")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (entry("F7", [2], 0, 8), "SD114"),
        (entry(5, [2], 0, 8), "SD114"),
        ({"shape": [2], "data_offsets": [0, 8]}, "SD114"),
        (entry("F32", [-2], 0, 8), "SD115"),
        (entry("F32", [2.0], 0, 8), "SD115"),
        (entry("F32", [True, 2], 0, 8), "SD115"),
        (entry("F32", "2", 0, 8), "SD115"),
        (entry("F32", [1 << 70], 0, 8), "SD115"),
        (entry("F32", [1 << 40, 1 << 40], 0, 8), "SD115"),
        ({"dtype": "F32", "data_offsets": [0, 8]}, "SD115"),
        (entry("F32", [2], 8, 0), "SD112"),
        (entry("F32", [2], -8, 0), "SD112"),
        (entry("F32", [2], 0, 1 << 64), "SD112"),
        (entry("F32", [2], 0.0, 8), "SD112"),
        ({"dtype": "F32", "shape": [2]}, "SD112"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}, "SD112"),
        (entry("F32", [1000, 1000], 0, 8), "SD113"),
        (entry("F4", [3], 0, 8), "SD113"),
        ([1, 2], "SD101"),
    ],
)
def test_bad_entry_has_its_own_code_and_hides_no_other(
    single: Open, value: object, code: str
) -> None:
    good, data = table("good")
    checkpoint = single({"bad": value, **good}, data)
    diagnostic = only(checkpoint)
    assert diagnostic.code == code
    assert diagnostic.where.startswith("model.safetensors::bad")
    assert set(checkpoint.tensors) == {"good"}


def test_packed_dtype_needs_whole_bytes(single: Open) -> None:
    checkpoint = single({"a": entry("F4", [4], 0, 2), "b": entry("F6_E2M3", [4], 2, 5)}, bytes(5))
    assert checkpoint.diagnostics == ()


def test_every_defect_of_one_entry_is_reported(single: Open) -> None:
    checkpoint = single({"bad": {"dtype": "X", "shape": [-1], "data_offsets": [3]}}, b"")
    assert codes(checkpoint) == ["SD114", "SD115", "SD112"]


def test_overlap_names_both_tensors_and_the_bytes(single: Open) -> None:
    header = {"k_proj": entry("F32", [2], 0, 8), "v_proj": entry("F32", [2], 4, 12)}
    diagnostic = only(single(header, bytes(12)))
    assert diagnostic.code == "SD110"
    assert "`k_proj`" in diagnostic.message
    assert "4 bytes" in diagnostic.message
    assert (diagnostic.expected, diagnostic.found) == ("begin 8", "begin 4")


def test_equal_ranges_overlap(single: Open) -> None:
    header = {"k_proj": entry("F32", [2], 0, 8), "v_proj": entry("F32", [2], 0, 8)}
    assert codes(single(header, bytes(8))) == ["SD110"]


def test_gap_is_sd111_before_the_first_and_between_tensors(single: Open) -> None:
    header = {"a": entry("F32", [2], 8, 16), "b": entry("F32", [2], 24, 32)}
    checkpoint = single(header, bytes(32))
    assert codes(checkpoint) == ["SD111", "SD111"]
    assert "8 bytes" in checkpoint.diagnostics[1].message


def test_trailing_bytes_are_sd109(single: Open) -> None:
    header, data = table("a")
    diagnostic = only(single(header, data + bytes(8)))
    assert diagnostic.code == "SD109"
    assert "8 bytes" in diagnostic.message


def test_truncated_data_names_the_first_cut_tensor(single: Open) -> None:
    header, data = table("a", "b", "c")
    checkpoint = single(header, data[:-10])
    diagnostic = only(checkpoint)
    assert diagnostic.code == "SD108"
    assert diagnostic.where == "model.safetensors::b[2 F32]"
    assert "10 bytes early" in diagnostic.message
    assert checkpoint.read_bytes("a") == bytes(range(8))
    with pytest.raises(DiagnosticError) as caught:
        checkpoint.read_bytes("c")
    assert caught.value.diagnostics[0].code == "SD108"


def test_metadata_must_be_text(single: Open) -> None:
    header, data = table("a")
    diagnostic = only(single({"__metadata__": {"n": 1}, **header}, data))
    assert (diagnostic.code, diagnostic.where) == ("SD101", "model.safetensors::__metadata__")


def test_unknown_entry_key_is_a_warning(single: Open) -> None:
    checkpoint = single({"a": {**entry("F32", [2], 0, 8), "strides": [1]}}, bytes(8))
    diagnostic = only(checkpoint)
    assert (diagnostic.code, diagnostic.severity) == ("SD101", "warning")
    assert "`strides`" in diagnostic.message
    assert "a" in checkpoint.tensors


def test_many_defects_are_capped_with_a_count(single: Open) -> None:
    checkpoint = single({f"t{i}": entry("F7", [2], 0, 8) for i in range(500)}, bytes(8))
    assert len(checkpoint.diagnostics) == 100
    assert checkpoint.diagnostics[-1].notes == ("400 more of SD114 are not listed",)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_fifo_does_not_block(directory: Path) -> None:
    os.mkfifo(directory / "model.safetensors")
    assert codes(open_checkpoint(directory)) == ["SD135"]


def test_directory_in_place_of_a_file(directory: Path) -> None:
    (directory / "model.safetensors").mkdir()
    assert codes(open_checkpoint(directory)) == ["SD135"]


@pytest.mark.parametrize("depth", range(850, 1000, 10))
def test_nesting_near_the_interpreters_limit(single: Open, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    header = b'{"\\u0061": {"dtype": "F32", "shape": ' + deep + b', "data_offsets": ' + deep + b"}}"
    found = set(codes(single(header, b"")))
    assert found <= {"SD101", "SD115", "SD112"}
    assert found


def test_names_are_escaped_for_terminals(single: Open) -> None:
    header = {"a\x1b[31m\n": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}
    diagnostic = only(single(header, bytes(12)))
    assert "\x1b" not in diagnostic.where + diagnostic.message
    assert "\\x1b[31m\\n" in diagnostic.message
