"""Which files and documents a corpus has, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap import documents
from specctl.tokenmap.documents import find_corpus


def texts(*sources: Path | str, **options: Any) -> list[str]:
    return [document.text for document in find_corpus(sources, **options).documents()]


def jsonl(path: Path, *values: Any) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def code_of(*sources: Path | str, **options: Any) -> tuple[str, str]:
    with pytest.raises(DiagnosticError) as caught:
        texts(*sources, **options)
    diagnostic = caught.value.diagnostics[0]
    return diagnostic.code, diagnostic.where


def test_directories_are_searched_in_a_fixed_order(corpus_dir: Path) -> None:
    files = find_corpus([corpus_dir]).files
    names = [path.relative_to(corpus_dir).as_posix() for path in files]
    assert names == sorted(names)
    assert len(names) == 41
    assert not any("hidden" in name or name.endswith(".py") for name in names)
    assert len(texts(corpus_dir)) == 60


def test_a_file_counts_once_however_it_is_named(corpus_dir: Path) -> None:
    sources = [corpus_dir / "03.txt", corpus_dir, str(corpus_dir / "*.txt")]
    assert len(find_corpus(sources).files) == 41


def test_patterns(corpus_dir: Path) -> None:
    assert len(find_corpus([str(corpus_dir / "1?.txt")]).files) == 10
    assert len(find_corpus([str(corpus_dir / "**" / "*.md")]).files) == 20


def test_a_named_file_is_read_whatever_its_suffix(corpus_dir: Path) -> None:
    assert texts(corpus_dir / "ignored.py") == ["import nothing"]


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
    assert texts(path, fields=["question"]) == ["q"]
    assert texts(path, fields=["question", "answer"]) == ["q\na\nb"]
    assert code_of(path, fields=["question", "absent"]) == ("SD423", f"{path}#1")


def test_roles_select_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    path = jsonl(tmp_path / "a.jsonl", {"messages": messages})
    assert texts(path, roles=["assistant"]) == ["r"]


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
    assert code_of(path) == ("SD423", f"{path}#{line}")


def test_a_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    assert code_of(path) == ("SD423", str(path))


def test_long_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 64)
    path = jsonl(tmp_path / "a.jsonl", {"text": "x" * 100})
    assert code_of(path) == ("SD423", f"{path}#1")


def test_sources_without_files(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        find_corpus([tmp_path / "absent", tmp_path, str(tmp_path / "*.txt")])
    assert [d.code for d in caught.value.diagnostics] == ["SD422"] * 3
    with pytest.raises(DiagnosticError, match="SD422"):
        find_corpus([])


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert texts(tmp_path) == ["abc", "x"]


def test_half_surrogate_pairs_are_replaced_and_marked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    found = list(find_corpus([path]).documents())
    assert [d.text for d in found] == ["a\ufffd", "\U0001f600"]
    assert [d.was_replaced for d in found] == [True, False]


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_large_files_are_cut_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 400)
    text = mark.join(f"word{n}" for n in range(300)) + "\r\n\u00e9"
    path = tmp_path / "large.txt"
    path.write_bytes(text.encode())
    pieces = texts(path)
    assert len(pieces) > 10
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= 400 for piece in pieces)
    if mark.strip(" ") == "\n":
        assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert texts(jsonl(tmp_path / "large.jsonl", {"text": text})) == pieces
