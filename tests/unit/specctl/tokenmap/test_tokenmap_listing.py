"""Which files a corpus has, in which order, and what is said of those that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, count_corpus
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.sources import find_files


def names(*sources: Path | str) -> list[str]:
    return [file.path for file in find_files([str(source) for source in sources])]


def test_directories_are_searched_in_a_fixed_order(corpus_dir: Path) -> None:
    found = [Path(name).relative_to(corpus_dir).as_posix() for name in names(corpus_dir)]
    assert found == sorted(found)
    assert len(found) == 42
    assert not any("hidden" in name for name in found)


def test_a_file_counts_once_however_it_is_named(corpus_dir: Path) -> None:
    assert len(names(corpus_dir / "03.txt", corpus_dir, corpus_dir / "*.txt")) == 42


def test_patterns(corpus_dir: Path) -> None:
    assert len(names(corpus_dir / "1?.txt")) == 10
    assert len(names(corpus_dir / "**" / "*.md")) == 20


def test_sources_without_files(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        names(tmp_path / "absent", tmp_path, tmp_path / "*.txt")
    assert [d.code for d in caught.value.diagnostics] == ["SD422"] * 3
    with pytest.raises(DiagnosticError, match="SD422"):
        names()


def test_names_may_hold_anything(tmp_path: Path) -> None:
    for name in (b"line\nend.txt", b"[x]*.txt", b"a=b.txt", b"\xff\xfe.txt"):
        (tmp_path / os.fsdecode(name)).write_text("text")
    assert len(names(tmp_path)) == 4
    assert names(tmp_path / "[x]*.txt") == [str(tmp_path / "[x]*.txt")]
    assert names(tmp_path / "a=b.txt") == [str(tmp_path / "a=b.txt")]


def test_links_and_devices(corpus_dir: Path, tokenizer: LoadedTokenizer) -> None:
    """Links to directories and devices are no files; a link to nothing is a counted warning."""
    before = len(names(corpus_dir))
    (corpus_dir / "up").symlink_to(corpus_dir)
    (corpus_dir / "zero.txt").symlink_to("/dev/zero")
    os.mkfifo(corpus_dir / "pipe.txt")
    assert len(names(corpus_dir)) == before
    (corpus_dir / "self.txt").symlink_to("self.txt")
    (corpus_dir / "gone.txt").symlink_to("nowhere.txt")
    spec = CorpusSpec(sources=(str(corpus_dir),))
    found = count_corpus(spec, tokenizer, CountOptions(workers=1)).diagnostics
    assert [(d.code, d.severity) for d in found] == [("SD423", "warning")]
    assert [note[: note.index(",")] for note in found[0].notes] == [
        "1 x a file that cannot be read (No such file or directory)",
        "1 x a file that cannot be read (Too many levels of symbolic links)",
    ]


def test_a_directory_that_cannot_be_read_is_named(
    corpus_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def refusing(path: str) -> object:
        if path.endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr("specctl.tokenmap.listing.os.scandir", refusing)
    with pytest.raises(DiagnosticError) as caught:
        names(corpus_dir)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.where) == ("SD423", str(corpus_dir / "deep"))
    assert diagnostic.message.endswith("Permission denied")


def test_names_that_are_no_text_are_escaped(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    for name in (b"\xff", b"new\nline"):
        domain = tmp_path / "corpus" / os.fsdecode(name)
        domain.mkdir(parents=True)
        for number in range(9):
            (domain / f"{number}.txt").write_text(f"some text {number}")
        (domain / os.fsdecode(b"bad\xff.txt")).write_bytes(b"\0")
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "x", "lang": "\\ud800"}\n')
    spec = CorpusSpec(sources=(str(tmp_path / "corpus"),), language_field="lang")
    counts = tmp_path / "corpus.counts"
    result = count_corpus(spec, tokenizer, CountOptions(workers=1, counts=counts))
    assert count_corpus(spec, tokenizer, CountOptions(counts=counts)) == result
    names = {row.name for row in result.artefact.counted.domains}
    assert names >= {"\\udcff", "new\\nline"}
    assert [d.code for d in result.diagnostics] == ["SD434"]
