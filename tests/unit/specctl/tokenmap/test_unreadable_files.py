"""What the system does not let read has one code: alone, among others, as texts, ids or outputs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.tokenmap import readers
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, count_corpus
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.outputs import check_outputs, read_outputs
from specctl.tokenmap.sources import SourceFile, find_files

DENIED = PermissionError(13, "Permission denied")
needs_arrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow (extra tokenmap) is not installed"
)
needs_numpy = pytest.mark.skipif(
    importlib.util.find_spec("numpy") is None, reason="numpy (extra tokenmap) is not installed"
)


def count(tokenizer: LoadedTokenizer, *sources: Path | str) -> tuple[Diagnostic, ...]:
    corpus = CorpusSpec(sources=tuple(map(str, sources)))
    return count_corpus(corpus, tokenizer, CountOptions(workers=1)).diagnostics


def refused(call: Callable[[], object]) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        call()
    (found,) = caught.value.diagnostics
    assert (found.code, found.severity) == ("SD423", "error")
    return found


def deny_opening(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    real = readers.io.FileIO  # type: ignore[attr-defined]

    def opened(name: str) -> object:
        if name == str(path):
            raise DENIED
        return real(name)

    monkeypatch.setattr(readers.io, "FileIO", opened)  # type: ignore[attr-defined]


def deny_looking(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let the system say nothing of a directory's entries, as without its `x` permission."""
    real = Path.stat

    def looked(self: Path, **options: bool) -> os.stat_result:
        if directory in self.parents:
            raise DENIED
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", looked)


def deny_listing(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    real = os.scandir

    def listed(path: str | Path) -> object:
        if Path(path) == directory:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", listed)


def test_a_file_has_the_same_code_alone_and_in_a_directory(
    corpus_dir: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus_dir / "03.txt"
    deny_opening(monkeypatch, path)
    (found,) = count(tokenizer, corpus_dir)
    assert (found.code, found.severity, found.where) == ("SD423", "warning", str(path))
    assert found.notes == (f"1 x a file that cannot be read (Permission denied), first at {path}",)
    alone = refused(lambda: count(tokenizer, path))
    assert (alone.where, alone.notes) == (found.where, found.notes)


def test_what_cannot_be_read_and_what_is_no_text_are_told_apart(
    corpus_dir: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny_opening(monkeypatch, corpus_dir / "03.txt")
    (corpus_dir / "04.txt").write_bytes(b"\0")
    found = {d.code: d for d in count(tokenizer, corpus_dir)}
    assert sorted(found) == ["SD423", "SD434"]
    assert all(len(d.notes) == 1 for d in found.values())
    refused(lambda: count(tokenizer, corpus_dir / "03.txt", corpus_dir / "04.txt"))


@needs_arrow
def test_a_file_of_any_form_is_one_that_cannot_be_read(
    corpus_dir: Path, tokenizer: LoadedTokenizer
) -> None:
    for name in ("a.txt", "a.jsonl", "a.txt.gz", "a.txt.zst", "a.parquet", "a.arrow"):
        (corpus_dir / name).symlink_to(f"nowhere-{name}")
    (found,) = count(tokenizer, corpus_dir)
    assert found.code == "SD423"
    (note,) = found.notes
    assert note.startswith("6 x a file that cannot be read (No such file or directory), first at")


def test_a_link_to_nothing_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to("nowhere.txt")
    found = refused(lambda: find_files([str(tmp_path / "gone.txt")]))
    assert found.where == str(tmp_path / "gone.txt")


@pytest.mark.parametrize("source", ["", "deep", "**/*.md", "deep/*.md", "d*/*.md"])
def test_a_directory_has_the_same_code_however_it_is_named(
    corpus_dir: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    deny_listing(monkeypatch, corpus_dir / "deep")
    found = refused(lambda: find_files([str(corpus_dir / source)]))
    assert found.where == str(corpus_dir / "deep")
    assert found.message.endswith("Permission denied")


def test_all_arguments_are_judged(corpus_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny_listing(monkeypatch, corpus_dir / "deep")
    with pytest.raises(DiagnosticError) as caught:
        find_files([str(corpus_dir), str(corpus_dir / "absent"), str(corpus_dir / "deep")])
    assert [d.code for d in caught.value.diagnostics] == ["SD423", "SD422", "SD423"]


def test_a_file_in_a_directory_that_is_closed(
    corpus_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus_dir / "deep" / "0.md"
    deny_looking(monkeypatch, corpus_dir / "deep")
    for source in (str(path), f"name={path}"):
        assert "Permission denied" in refused(lambda: find_files([source])).message  # noqa: B023 - called at once
    assert "Permission denied" in refused(lambda: check_outputs([str(path)])).message
    outputs = refused(lambda: read_outputs([path], tokenizer_size=9, encode=lambda texts: []))
    assert "Permission denied" in outputs.message


@needs_numpy
@pytest.mark.parametrize("name", ["ids.bin", "ids.npy"])
def test_token_ids(tmp_path: Path, name: str) -> None:
    from specctl.tokenmap.token_ids import count_ids

    file = SourceFile(path=str(tmp_path / name), domain="ids", num_bytes=8)
    found = refused(lambda: count_ids([file], size=9, id_type="u16", held_below=0))
    assert (found.where, found.message) == (file.path, "cannot be read: No such file or directory")
