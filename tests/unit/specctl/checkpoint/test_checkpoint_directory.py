"""Which files belong to a checkpoint, and what is said about the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from container_files import codes, entry, only, safetensors_bytes, table

from specctl.checkpoint import Checkpoint, open_checkpoint, resolve_source
from specctl.contract.diagnostics import DiagnosticError

Open = Callable[..., Checkpoint]
S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write(path: Path, *keys: str) -> None:
    path.write_bytes(safetensors_bytes(*table(*keys)))


def test_sharded_checkpoint_is_whole(sharded: Open) -> None:
    index = {"metadata": {"total_size": 24}, "weight_map": {"a": S1, "b": S2, "c": S2}}
    checkpoint = sharded(index, {S1: ("a",), S2: ("b", "c")})
    assert checkpoint.diagnostics == ()
    assert checkpoint.layout == "sharded"
    assert {k: t.file for k, t in checkpoint.tensors.items()} == index["weight_map"]
    assert [f.file for f in checkpoint.files] == [S1, S2]
    assert checkpoint.read_bytes("c") == bytes(range(8))


def test_missing_shard_names_file_and_count(sharded: Open) -> None:
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2, "c": S2}}, {S1: ("a",)})
    diagnostic = only(checkpoint)
    assert (diagnostic.code, diagnostic.where) == ("SD102", S2)
    assert "2 tensors" in diagnostic.message


def test_tensor_the_shard_lacks(sharded: Open) -> None:
    checkpoint = sharded({"weight_map": {"a": S1, "x": S1, "b": S2}}, {S1: ("a",), S2: ("b",)})
    diagnostic = only(checkpoint)
    assert (diagnostic.code, diagnostic.where) == ("SD125", f"{S1}::x")


def test_tensor_in_another_shard_than_the_index_says(sharded: Open) -> None:
    checkpoint = sharded({"weight_map": {"a": S1, "b": S1, "c": S2}}, {S1: ("a",), S2: ("b", "c")})
    diagnostic = only(checkpoint)
    assert diagnostic.code == "SD125"
    assert (diagnostic.expected, diagnostic.found) == (f"`{S1}`", f"`{S2}`")
    assert checkpoint.tensors["b"].file == S2


def test_tensor_that_the_index_forgets_is_reported_and_kept(sharded: Open) -> None:
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2}}, {S1: ("a", "d2t"), S2: ("b",)})
    diagnostic = only(checkpoint)
    assert (diagnostic.code, diagnostic.where) == ("SD126", f"{S1}::d2t[2 F32]")
    assert "d2t" in checkpoint.tensors


def test_tensor_in_two_shards_keeps_the_indexed_copy(sharded: Open) -> None:
    index = {"weight_map": {"a": S1, "b": S2}}
    checkpoint = sharded(index, {S1: ("a", "b"), S2: ("b",)})
    diagnostic = only(checkpoint)
    assert diagnostic.code == "SD104"
    assert S1 in diagnostic.message
    assert S2 in diagnostic.message
    assert checkpoint.tensors["b"].file == S2


def test_total_size_and_shard_count_are_warnings(sharded: Open) -> None:
    third = "model-00001-of-00003.safetensors"
    checkpoint = sharded(
        {"metadata": {"total_size": 99}, "weight_map": {"a": third}}, {third: ("a",)}
    )
    assert codes(checkpoint) == ["SD130", "SD129"]
    assert {d.severity for d in checkpoint.diagnostics} == {"warning"}
    assert (checkpoint.diagnostics[1].expected, checkpoint.diagnostics[1].found) == ("8", "99")


def test_total_size_as_written_by_other_tools(sharded: Open) -> None:
    checkpoint = sharded(
        {"metadata": {"total_size": 16.0}, "weight_map": {"a": S1, "b": S2}},
        {S1: ("a",), S2: ("b",)},
    )
    assert checkpoint.diagnostics == ()


def test_stray_files_beside_the_index_are_ignored(sharded: Open, directory: Path) -> None:
    write(directory / "model.safetensors", "z")
    write(directory / "consolidated.safetensors", "layers.0.a", "layers.0.b")
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2}}, {S1: ("a",), S2: ("b",)})
    assert [(d.code, d.severity, d.where) for d in checkpoint.diagnostics] == [
        ("SD124", "warning", "consolidated.safetensors"),
        ("SD124", "warning", "model.safetensors"),
    ]
    assert INDEX in checkpoint.diagnostics[0].message
    assert checkpoint.tensors["a"].file == S1


def test_a_stray_file_with_an_indexed_tensor_is_an_error(sharded: Open, directory: Path) -> None:
    """Vllm issue 54230: a loader that globs overwrote the indexed weights."""
    write(directory / "extra.safetensors", "a", "b", "z")
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2}}, {S1: ("a",), S2: ("b",)})
    found = only(checkpoint)
    assert (found.code, found.severity) == ("SD104", "error")
    assert found.where == "extra.safetensors::a[2 F32]"
    assert "2 of its tensors" in found.message
    assert S1 in found.message
    assert found.found == "2 of the 3 tensors of `extra.safetensors` in two files"
    assert {t.file for t in checkpoint.tensors.values()} == {S1, S2}


def test_a_stray_file_that_cannot_be_read_stays_a_warning(sharded: Open, directory: Path) -> None:
    (directory / "extra.safetensors").write_bytes(b"<html>")
    found = only(sharded({"weight_map": {"a": S1, "b": S2}}, {S1: ("a",), S2: ("b",)}))
    assert (found.code, found.severity) == ("SD124", "warning")
    assert found.notes == ("its header cannot be read, so its tensors are not known",)


def test_an_index_without_its_files_is_an_error_beside_the_single_file(
    sharded: Open, directory: Path
) -> None:
    write(directory / "model.safetensors", "a")
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2}}, {})
    assert codes(checkpoint) == ["SD102", "SD102", "SD124"]
    assert {d.severity for d in checkpoint.diagnostics} == {"error"}
    text = checkpoint.diagnostics[2].message
    assert "the index decides, and none of the 2 files it names is here" in text
    assert "`model.safetensors`, which it does not name, was read to check the rest" in text
    assert checkpoint.tensors["a"].file == "model.safetensors"


def test_stray_file_beside_the_single_file(single: Open, directory: Path) -> None:
    write(directory / "other.safetensors", "b")
    found = only(single(*table("a")))
    assert (found.code, found.where) == ("SD124", "other.safetensors")
    write(directory / "other.safetensors", "a")
    again = only(single(*table("a")))
    assert (again.code, again.where) == ("SD104", "other.safetensors::a[2 F32]")


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": {}}, {"weight_map": [1]}, {"weight_map": None}, {"metadata": {}}],
)
def test_index_without_map(sharded: Open, index: object) -> None:
    checkpoint = sharded(index, {})
    assert codes(checkpoint) == ["SD127"]
    assert checkpoint.diagnostics[0].where == f"{INDEX}#/weight_map"


def test_index_value_that_is_no_name(sharded: Open) -> None:
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2, "x/y": 7}}, {S1: ("a",), S2: ("b",)})
    assert only(checkpoint).where == f"{INDEX}#/weight_map/x~1y"


def test_broken_index_still_reads_the_files_for_more_problems(
    sharded: Open, directory: Path
) -> None:
    (directory / S2).write_bytes(b"GGUF" + bytes(60))
    checkpoint = sharded(b"{nope", {S1: ("a",)})
    assert codes(checkpoint) == ["SD117", "SD122", "SD106"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret.safetensors", "climbs out"),
        ("sub/../../secret.safetensors", "climbs out"),
        ("/etc/passwd", "absolute"),
        ("C:\\x.safetensors", "not a file name"),
        ("c:x.safetensors", "absolute"),
        ("a\x00b", "not a file name"),
        ("", "not a file name"),
        ("x" * 3000, "longer"),
    ],
)
def test_index_names_stay_inside(sharded: Open, directory: Path, name: str, words: str) -> None:
    write(directory.parent / "secret.safetensors", "a")
    checkpoint = sharded({"weight_map": {"a": name, "b": S1}}, {S1: ("b",)})
    assert codes(checkpoint)[0] == "SD128"
    assert words in checkpoint.diagnostics[0].message
    assert "a" not in checkpoint.tensors


def test_link_out_of_the_directory_is_refused(sharded: Open, directory: Path) -> None:
    write(directory.parent / "secret.safetensors", "b")
    (directory / S2).symlink_to(directory.parent / "secret.safetensors")
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2}}, {S1: ("a",)})
    assert "SD128" in codes(checkpoint)
    assert "b" not in checkpoint.tensors


def test_links_of_a_hub_cache_are_inside(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for shard, key in ((S1, "a"), (S2, "b")):
        write(blobs / key, key)
        (snapshot / shard).symlink_to(Path("../../blobs") / key)
    (snapshot / INDEX).write_text(f'{{"weight_map": {{"a": "{S1}", "b": "{S2}"}}}}')
    (snapshot / "config.json").write_text("{}")
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.diagnostics == ()
    assert set(checkpoint.tensors) == {"a", "b"}


def test_dangling_link_is_a_missing_shard(sharded: Open, directory: Path) -> None:
    (directory / S2).symlink_to("nowhere")
    checkpoint = sharded({"weight_map": {"a": S1, "b": S2}}, {S1: ("a",)})
    assert only(checkpoint).code == "SD102"


def test_the_only_file_may_have_another_name(directory: Path) -> None:
    write(directory / "eagle.safetensors", "a")
    checkpoint = open_checkpoint(directory)
    assert (only(checkpoint).code, only(checkpoint).severity) == ("SD123", "info")
    assert set(checkpoint.tensors) == {"a"}


def test_a_lone_shard_is_not_a_checkpoint(directory: Path) -> None:
    write(directory / "model-00001-of-00004.safetensors", "a")
    diagnostic = only(open_checkpoint(directory))
    assert (diagnostic.code, diagnostic.severity) == ("SD130", "error")
    assert "4 files" in diagnostic.message


def test_several_files_without_index(directory: Path) -> None:
    write(directory / "one.safetensors", "fc", "a")
    write(directory / "two.safetensors", "fc", "b")
    checkpoint = open_checkpoint(directory)
    assert codes(checkpoint) == ["SD122", "SD104"]
    assert "2 safetensors files" in checkpoint.diagnostics[0].message


def test_config_without_weights(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert only(checkpoint).code == "SD121"
    assert (checkpoint.container, dict(checkpoint.tensors)) == ("none", {})


def test_weights_without_config(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", "a")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.config, checkpoint.config_digest) == (None, None)
    assert checkpoint.diagnostics == ()


def test_config_digest_is_of_the_bytes(single: Open, directory: Path) -> None:
    raw = b'\xef\xbb\xbf{ "hidden_size": 3 }\n'
    (directory / "config.json").write_bytes(raw)
    checkpoint = single(*table("a"))
    assert checkpoint.config == {"hidden_size": 3}
    assert checkpoint.config_digest == "sha256:" + hashlib.sha256(raw).hexdigest()
    assert (only(checkpoint).code, only(checkpoint).severity) == ("SD118", "warning")


@pytest.mark.parametrize(
    ("raw", "code", "severity", "is_read"),
    [
        (b'{"a": NaN}', "SD134", "error", True),
        (b'{"a": -Infinity}', "SD134", "warning", True),
        (b'{"a": 1e999}', "SD134", "warning", True),
        (b'{"a": 1, "a": 2}', "SD116", "error", True),
        (b'{"a": {"b": 1, "b": 2}}', "SD116", "error", True),
        (b"[1]", "SD117", "error", False),
        (b"", "SD117", "error", False),
        (b"\xff\xfe{\x00}\x00", "SD117", "error", False),
        (b'{"a": "caf\xe9"}', "SD117", "error", False),
        (b'{"a":' * 200_000, "SD117", "error", False),
        (b"[" * 200_000, "SD117", "error", False),
        (b'{"a":' + b"[" * 150 + b"]" * 150 + b"}", "SD117", "error", False),
    ],
)
def test_config_defects(
    single: Open, directory: Path, raw: bytes, code: str, severity: str, is_read: bool
) -> None:
    (directory / "config.json").write_bytes(raw)
    checkpoint = single(*table("a"))
    assert (only(checkpoint).code, only(checkpoint).severity) == (code, severity)
    assert only(checkpoint).where.startswith("config.json")
    assert (checkpoint.config is not None) is is_read


def test_json_file_and_digest(single: Open, directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    (directory / "tokenizer_config.json").write_text('{"a": 1, "a": 2}')
    checkpoint = single(*table("a"))
    assert checkpoint.json_file("generation_config.json") == {"eos_token_id": 2}
    assert checkpoint.json_file("absent.json") is None
    assert checkpoint.file_digest("absent.json") is None
    assert checkpoint.file_digest("generation_config.json") == (
        "sha256:" + hashlib.sha256(b'{"eos_token_id": 2}').hexdigest()
    )
    with pytest.raises(DiagnosticError, match="SD116"):
        checkpoint.json_file("tokenizer_config.json")
    with pytest.raises(ValueError, match="not a file name"):
        checkpoint.json_file("../config.json")


def test_ids_and_masks(single: Open) -> None:
    d2t = (0).to_bytes(8, "little") + (-3).to_bytes(8, "little", signed=True)
    header = {
        "d2t": entry("I64", [2], 0, 16),
        "t2d": entry("BOOL", [3], 16, 19),
        "bad": entry("U8", [2], 19, 21),
        "real": entry("F16", [1], 21, 23),
    }
    checkpoint = single(header, d2t + b"\x01\x00\x01" + b"\x00\x02" + b"\x00\x00")
    assert checkpoint.read_ints("d2t") == (0, -3)
    assert checkpoint.read_mask("t2d") == b"\x01\x00\x01"
    with pytest.raises(DiagnosticError, match="position 1 of the mask holds 2"):
        checkpoint.read_mask("bad")
    with pytest.raises(DiagnosticError, match="position 1 of the mask holds -3"):
        checkpoint.read_mask("d2t")
    with pytest.raises(DiagnosticError, match="F16 does not hold integers"):
        checkpoint.read_ints("real")
    with pytest.raises(KeyError):
        checkpoint.read_ints("absent")


def test_large_tensor_is_not_read_as_ids(directory: Path) -> None:
    size = 9_000_000 * 8
    raw = safetensors_bytes({"w": entry("I64", [9_000_000], 0, size)})
    with (directory / "model.safetensors").open("wb") as stream:  # sparse
        stream.write(raw)
        stream.truncate(len(raw) + size)
    with pytest.raises(DiagnosticError, match="SD133"):
        open_checkpoint(directory).read_ints("w")


def code_of(source: object) -> tuple[str, str]:
    with pytest.raises(DiagnosticError) as caught:
        open_checkpoint(source)  # type: ignore[arg-type]
    (diagnostic,) = caught.value.diagnostics
    return diagnostic.code, f"{diagnostic.message} {diagnostic.help}"


def test_sources_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model.safetensors", "a")
    (tmp_path / "empty").mkdir()
    assert code_of("org/name") == (
        "SD120",
        code_of("org/name")[1],
    )
    assert "Write `hf:org/name`" in code_of("org/name")[1]
    assert "Write `ms:org/name`" in code_of("https://modelscope.cn/models/org/name")[1]
    assert code_of("https://huggingface.co/org/name")[0] == "SD120"
    assert code_of("org/name@main")[0] == "SD120"
    assert code_of("./org/name")[0] == "SD119"
    assert code_of("a/b/c")[0] == "SD119"
    assert code_of(tmp_path / "org" / "name")[0] == "SD119"
    code, text = code_of(tmp_path / "model.safetensors")
    assert code == "SD119"
    assert f"`{tmp_path}`" in text
    assert code_of(tmp_path / "empty")[0] == "SD119"
    assert code_of("x" * 5000)[0] == "SD119"
    assert code_of("")[0] == "SD119"
    assert code_of(" ")[0] == "SD119"
    assert code_of("a\x00b")[0] == "SD119"
    assert code_of("~no-such-user-here/x")[0] == "SD119"


def test_existing_relative_directory_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_source("org/name") == Path("org/name")
