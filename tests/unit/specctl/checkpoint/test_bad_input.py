"""Files that were made to do harm, or were harmed: each is a code, and costs next to nothing."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from container_files import codes, safetensors_bytes, table

from specctl.checkpoint import open_checkpoint
from specctl.checkpoint.directory import read_store
from specctl.checkpoint.sources.local import LocalFile, LocalStore
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.inspect import inspect
from tests.fuzz_entry import MAX_CPU_S, MAX_GROWTH_BYTES, check_cpu, directory, judge, measured
from tests.fuzz_strategies import fixture

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
SOUND = safetensors_bytes(*table("a", "b"))
MIB = 1 << 20


def errors(files: Mapping[str, bytes]) -> set[str]:
    """Return the codes of severity error, the promises of `judge` held."""
    return {item.code for item in judge(files).diagnostics if item.severity == "error"}


def archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as stream:
        for name, data in members.items():
            stream.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_bomb_is_not_unpacked(compression: int) -> None:
    bomb = archive({"x/data.pkl": b"\x80\x02" + b"N" * (64 * MIB) + b"."}, compression)
    assert len(bomb) < MIB
    assert "SD132" in errors({CONFIG: b"{}", "pytorch_model.bin": bomb})


def test_a_zip_whose_directory_lies_about_a_size() -> None:
    raw = bytearray(archive({"x/data.pkl": b"\x80\x02}."}))
    entry = raw.rindex(b"PK\x01\x02")
    raw[entry + 20 : entry + 28] = (0xFFFFFF00).to_bytes(4, "little") * 2
    assert "SD132" in errors({CONFIG: b"{}", "pytorch_model.bin": bytes(raw)})


@pytest.mark.parametrize("opcode", [b"]", b"}", b"(", b"N", b"\x85", b"\x94", b"K\xff", b")"])
def test_a_pickle_of_one_opcode(opcode: bytes) -> None:
    pickled = b"\x80\x02]" + opcode * ((MIB - 4096) // len(opcode)) + b"."
    files = {CONFIG: b"{}", "pytorch_model.bin": archive({"x/data.pkl": pickled})}
    assert "SD132" in errors(files)


def test_a_header_above_the_limit_is_refused_by_its_length() -> None:
    with directory({CONFIG: b"{}", WEIGHTS: (100_000_001).to_bytes(8, "little") + b"{"}) as root:
        os.truncate(root / WEIGHTS, 200_000_000)
        report, cost = measured(root, None)
    found = next(item for item in report.diagnostics if item.code == "SD101")
    assert "100000001" in found.message
    assert "100000000" in found.message
    assert cost.growth_bytes < 4 * MIB
    check_cpu(cost, MAX_CPU_S)


def test_a_header_as_long_as_a_sparse_file_of_zeros() -> None:
    with directory({CONFIG: b"{}", WEIGHTS: (99_999_000).to_bytes(8, "little") + b"{"}) as root:
        os.truncate(root / WEIGHTS, 100_000_000)
        report, cost = measured(root, None)
    assert "SD101" in {item.code for item in report.diagnostics}
    assert cost.growth_bytes <= 3 * 100_000_000


DEEP = [b"[" * 300_000, b'{"a":' * 100_000, b"[" * 150 + b"]" * 150, b'{"a":[' * 60 + b"]}" * 60]


@pytest.mark.parametrize("deep", DEEP)
def test_deep_json(deep: bytes) -> None:
    assert errors({CONFIG: b'{"x":' + deep + b"}", WEIGHTS: SOUND}) & {"SD117"}
    assert errors({CONFIG: b"{}", INDEX: b'{"weight_map":' + deep + b"}"}) & {"SD117", "SD127"}
    text = b'{"a":' + deep + b"}"
    assert errors({CONFIG: b"{}", WEIGHTS: safetensors_bytes(text)}) & {"SD101", "SD112"}


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
def test_numbers_that_json_does_not_have(word: bytes) -> None:
    found = {
        item.code: item.severity
        for item in judge({CONFIG: b'{"rope_theta": ' + word + b"}", WEIGHTS: SOUND}).diagnostics
    }
    assert "SD134" in found
    header = b'{"a":{"dtype":"U8","shape":[' + word + b'],"data_offsets":[0,0]}}'
    assert errors({CONFIG: b"{}", WEIGHTS: safetensors_bytes(header)}) & {"SD115", "SD134"}


@pytest.mark.parametrize("name", [CONFIG, INDEX, WEIGHTS])
def test_a_byte_order_mark(name: str) -> None:
    texts = {CONFIG: b"{}", INDEX: json.dumps({"weight_map": {"a": WEIGHTS}}).encode()}
    files = {CONFIG: b"{}", WEIGHTS: SOUND}
    text = texts.get(name, SOUND[8:])
    marked = b"\xef\xbb\xbf" + text
    files[name] = len(marked).to_bytes(8, "little") + marked if name == WEIGHTS else marked
    found = {item.code for item in judge(files).diagnostics}
    assert found & {"SD118", "SD101"}


NOT_UTF_8 = [b"\xff\xfe{\x00}\x00", b'{"a\xff": 1}', b'{"a": "\xc0\x80"}', b'{"\xed\xa0\x80": 1}']


@pytest.mark.parametrize("text", [*NOT_UTF_8, b'{"a": "\\ud800"}', b'{"\xe4": 1}'])
def test_text_that_is_not_utf_8(text: bytes) -> None:
    assert "SD117" in errors({CONFIG: text, WEIGHTS: SOUND})
    assert "SD117" in errors({CONFIG: b"{}", INDEX: text, "x.safetensors": SOUND})
    assert errors({CONFIG: b"{}", WEIGHTS: safetensors_bytes(text)}) & {"SD101", "SD106"}


@pytest.mark.parametrize("name", [CONFIG, INDEX, WEIGHTS, "generation_config.json"])
def test_a_link_out_of_the_directory(name: str, tmp_path: Path) -> None:
    root = tmp_path / "draft"
    root.mkdir()
    texts = {CONFIG: b"{}", INDEX: b'{"weight_map": {"a": "model.safetensors"}}', WEIGHTS: SOUND}
    for file, data in (texts | {"generation_config.json": b"{}"}).items():
        place = root / file if file != name else tmp_path / "secret"
        place.write_bytes(data)
    (root / name).symlink_to(tmp_path / "secret")
    found = {item.code for item in inspect(str(root)).diagnostics}
    assert "SD128" in found or name == "generation_config.json"  # a draft has no use for it
    (root / name).unlink()
    (root / name).symlink_to("/dev/zero")
    found = {item.code for item in inspect(str(root)).diagnostics}
    assert "SD128" in found or name == "generation_config.json"


def test_a_link_inside_the_directory_and_one_into_a_hub_cache(tmp_path: Path) -> None:
    root, cache = tmp_path / "draft", tmp_path / "models--a--b" / "blobs"
    root.mkdir()
    cache.mkdir(parents=True)
    (root / "kept.json").write_bytes(b"{}")
    (root / CONFIG).symlink_to("kept.json")
    (cache / "0123").write_bytes(SOUND)
    (root / WEIGHTS).symlink_to(cache / "0123")
    assert codes(open_checkpoint(root)) == []


PATHS = [
    *("../model.safetensors", "/etc/passwd", "a/../../x", "..", ".", "", "C:\\x", "\\\\host\\x"),
    *("a\x00b", "a" * 5000, "file:///etc/passwd", "~/x", "./../x", "x/" * 600, "\ud800", "\n"),
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_in_an_index(path: str) -> None:
    index = json.dumps({"weight_map": {"a": path, "b": WEIGHTS}}).encode()
    assert errors({CONFIG: b"{}", INDEX: index, WEIGHTS: SOUND}) & {
        "SD128",
        "SD102",
        "SD135",
        "SD117",
    }


def test_an_index_that_names_a_file_for_each_tensor() -> None:
    names = {f"k{number:x}": f"{number:x}.safetensors" for number in range(30_000)}
    report = judge({CONFIG: b"{}", INDEX: json.dumps({"weight_map": names}).encode()})
    assert "SD127" in {item.code for item in report.diagnostics}
    few = dict(list(names.items())[:9_000])
    report = judge({CONFIG: b"{}", INDEX: json.dumps({"weight_map": few}).encode()})
    missing = [item for item in report.diagnostics if item.code == "SD102"]
    assert len(missing) == 20
    assert "8980 more" in missing[-1].notes[0]


NUMBERED = (
    *("hf-llama-clean", "speculators-eagle3-clean", "speculators-mtp-clean", "hf-bailing-mtp"),
    *(
        "deepseek-v4-dspark-stages",
        "hf-gpt2-unsupported",
        "speculators-dspark-clean",
        "hf-deepseek-v3-mtp",
    ),
)


@pytest.mark.parametrize("base", NUMBERED)
@pytest.mark.parametrize("index", ["99999", "999999999", "9" * 5000])
def test_an_index_in_a_name_is_never_counted_up_to(base: str, index: str) -> None:
    files = dict(fixture(base))
    name = next(name for name in files if name.endswith(".safetensors"))
    length = int.from_bytes(files[name][:8], "little")
    header = json.loads(files[name][8 : 8 + length])
    seen: set[str] = set()
    for key in [key for key in header if any(part.isdigit() for part in key.split("."))]:
        form = "".join(char for char in key if not char.isdigit())
        if form in seen:
            continue
        seen.add(form)
        for place in [n for n, part in enumerate(key.split(".")) if part.isdigit()]:
            parts = key.split(".")
            parts[place] = index
            renamed = {".".join(parts) if old == key else old: v for old, v in header.items()}
            text = json.dumps(renamed).encode()
            judge(files | {name: safetensors_bytes(text, files[name][8 + length :])})


class ChangingFile:
    """A file that something happens to before its n-th read."""

    def __init__(self, inner: LocalFile, before: Callable[[], None]) -> None:
        self._inner, self._before = inner, before
        self.size = inner.size

    def read_at(self, begin: int, end: int) -> bytes:
        self._before()
        return self._inner.read_at(begin, end)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> ChangingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChangingStore(LocalStore):
    """A directory in which `change` happens before read number `turn` of `name`."""

    def __init__(self, root: Path, name: str, turn: int, change: Callable[[Path], None]) -> None:
        super().__init__(root)
        self._name, self._left, self._change = name, turn, change

    def open(self, name: str) -> LocalFile:
        inner = super().open(name)
        if name != self._name:
            return inner
        return ChangingFile(inner, self._count)  # type: ignore[return-value]

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._change(self.root / self._name)


def _cut(path: Path) -> None:
    os.truncate(path, 40)


def _fill(path: Path) -> None:
    path.write_bytes(b"\x00" * path.stat().st_size)


def _grow(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x" * 100)


@pytest.mark.parametrize("name", [CONFIG, INDEX, WEIGHTS])
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("change", [_cut, _fill, _grow])
def test_a_file_that_changes_while_it_is_read(
    name: str, turn: int, change: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / CONFIG).write_bytes(json.dumps({"hidden_size": 16, "x": "y" * 100}).encode())
    (tmp_path / WEIGHTS).write_bytes(SOUND)
    index = {"weight_map": {"a": WEIGHTS, "b": WEIGHTS}, "metadata": {"total_size": 16}}
    (tmp_path / INDEX).write_bytes(json.dumps(index).encode())
    checkpoint = read_store(ChangingStore(tmp_path, name, turn, change), where=str(tmp_path))
    is_read_once = name != WEIGHTS and turn == 2
    if is_read_once or change is _grow:  # what was read before is whole
        assert codes(checkpoint) == []
    else:
        assert set(codes(checkpoint)) & {"SD101", "SD117", "SD107"}
    for key in checkpoint.tensors:
        if change is not _grow:
            continue
        assert len(checkpoint.read_bytes(key)) == 8


def test_a_file_that_is_gone_or_shorter_after_it_was_opened(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(SOUND)
    (tmp_path / CONFIG).write_bytes(b"{}")
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / WEIGHTS, len(SOUND) - 1)
    assert len(checkpoint.read_bytes("a")) == 8
    with pytest.raises(DiagnosticError, match="SD108"):
        checkpoint.read_bytes("b")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(DiagnosticError, match="SD135"):
        checkpoint.read_bytes("a")


WORST: Sequence[tuple[str, str, bytes]] = (
    ("tokenizer.json", "header of one million brackets", b"[" * (MIB - 8)),
    (CONFIG, "empty lists", b'{"a":[' + b"[]," * ((MIB - 20) // 3) + b"[]]}"),
    (CONFIG, "empty objects", b'{"a":[' + b"{}," * ((MIB - 20) // 3) + b"{}]}"),
    (CONFIG, "one key again and again", b'{"a":0' + b',"a":0' * ((MIB - 20) // 6) + b"}"),
    (INDEX, "numbers", b'{"weight_map":{"a":[' + b"0," * ((MIB - 40) // 2) + b"0]}}"),
)


@pytest.mark.parametrize(("name", "title", "text"), WORST, ids=[title for _, title, _ in WORST])
def test_one_mebibyte_costs_at_most_64(name: str, title: str, text: bytes) -> None:
    with directory({CONFIG: b"{}", WEIGHTS: SOUND} | {name: text}) as root:
        _, cost = measured(root, None)
    assert cost.growth_bytes <= MAX_GROWTH_BYTES, title
    check_cpu(cost, MAX_CPU_S)
