"""Which text each line of a corpus holds, and what is said of those that hold none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.tokenmap import readers
from specctl.tokenmap.readers import Defect, Piece, Reading, read_pieces
from specctl.tokenmap.sources import find_files, plan_tasks


def found(*sources: Path, **options: Any) -> Iterator[Piece | Defect]:
    for task in plan_tasks(find_files([str(source) for source in sources])):
        for file in task.files:
            yield from read_pieces(file, task, Reading(**options))


def texts(*sources: Path, **options: Any) -> list[str]:
    return [p.data.decode() for p in found(*sources, **options) if isinstance(p, Piece)]


def defects(*sources: Path, **options: Any) -> list[tuple[str, str]]:
    return [(d.kind, d.where) for d in found(*sources, **options) if isinstance(d, Defect)]


def jsonl(path: Path, *values: Any) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def test_a_named_file_is_read_whatever_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes.unknown").write_text("import nothing")
    assert texts(tmp_path / "notes.unknown") == ["import nothing"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": "a", "content": "b"}, "a"),
        ({"content": "b", "prompt": "p"}, "b"),
        ({"prompt": "p", "completion": "c"}, "p\nc"),
        ({"prompt": "p"}, "p"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "x", "content": "r"}]}, "q\nr"),
        ({"conversations": [{"from": "human", "value": "q"}, {"value": "r"}]}, "q\nr"),
        ({"turns": ["first", "second"]}, "first\nsecond"),
        ({"messages": [{"content": [{"type": "text", "text": "t"}, {"type": "image"}]}]}, "t"),
        ({"messages": [{"role": "assistant", "content": None}, {"content": "x"}]}, "x"),
        ("plain", "plain"),
        ({"text": 5, "content": "b"}, "b"),
    ],
)
def test_usual_fields(tmp_path: Path, value: Any, expected: str) -> None:
    assert texts(jsonl(tmp_path / "a.jsonl", value)) == [expected]


def test_named_fields_are_joined(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"question": "q", "answer": ["a", "b"], "text": "t"})
    assert texts(path, fields=("question",)) == ["q"]
    assert texts(path, fields=("question", "answer")) == ["q\na\nb"]
    assert defects(path, fields=("question", "absent")) == [
        ("a line without a text in the named fields", f"{path}#1")
    ]


def test_roles_select_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    path = jsonl(tmp_path / "a.jsonl", {"messages": messages})
    assert texts(path, roles=("assistant",)) == ["r"]


def test_blank_documents_are_none(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n")
    path = jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": "x"})
    assert texts(tmp_path / "blank.txt", path) == ["x"]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (b'{"text": "ok"}\n{"text": \n', 2),
        (b"[1, 2]\n", 1),
        (b"17\n", 1),
        (b'{"label": "x"}\n', 1),
        (b"{}\n", 1),
        (b'{"messages": 4}\n', 1),
        (b'{"text": "\xff"}\n', 1),
        (b'{"a":' * 100_000 + b"\n", 1),
        (b'{"text": ' + b"9" * 5000 + b"}\n", 1),
    ],
)
def test_a_bad_line_has_its_number(tmp_path: Path, raw: bytes, line: int) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(raw)
    assert [where for _, where in defects(path)] == [f"{path}#{line}"]


def test_long_lines_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 64)
    path = jsonl(tmp_path / "a.jsonl", {"text": "x" * 100}, {"text": "y"})
    assert defects(path) == [("a line that is too long for one document", f"{path}#1")]
    assert texts(path) == ["y"]


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert texts(tmp_path) == ["abc", "x"]


def test_half_surrogate_pairs_are_replaced_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    assert texts(path) == ["a\ufffd", "\U0001f600"]
    assert [where for _, where in defects(path)] == [f"{path}#1"]


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
@pytest.mark.parametrize("piece_bytes", [7, 400, 1 << 20])
def test_large_files_are_cut_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", piece_bytes)
    text = mark.join(f"word of {n}" for n in range(300)) + "\r\n\u00e9"
    path = tmp_path / "large.txt"
    path.write_bytes(text.encode())
    pieces = [p for p in found(path) if isinstance(p, Piece)]
    assert b"".join(p.data for p in pieces).decode() == text
    assert [p.is_first for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.is_last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (len(pieces) > 1) == (piece_bytes < len(text))


@pytest.mark.parametrize("suffix", [".txt.zst", ".jsonl.zst"])
def test_zstd_streams_are_read(tmp_path: Path, suffix: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow (extra tokenmap) is not installed")
    lines = [f"line {n} \u6771\u4eac" for n in range(2000)]
    text = "\n".join(json.dumps({"text": line}) if "json" in suffix else line for line in lines)
    path = tmp_path / f"packed{suffix}"
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(text.encode())
    assert texts(tmp_path) == (lines if "json" in suffix else [text])
    path.write_bytes(path.read_bytes()[:-20])
    assert [where.split("#")[0] for _, where in defects(path)] == [str(path)]
    path.write_bytes(b"no zstd")
    assert [where for _, where in defects(path)] == [str(path)]


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped text \xc3\xa9")))
    [file] = find_files(["-"])
    assert (file.path, file.domain, file.num_bytes) == ("-", "stdin", 0)
    task = plan_tasks([file])[0]
    pieces = list(read_pieces(file, task, Reading()))
    assert [p.data for p in pieces if isinstance(p, Piece)] == [b"piped text \xc3\xa9"]
