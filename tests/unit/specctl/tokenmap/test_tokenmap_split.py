"""The held-out part depends on the texts only, and neither side is ever empty without need."""

from __future__ import annotations

import shutil
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.tokenmap.documents import Corpus, Document, find_corpus
from specctl.tokenmap.split import (
    counted_documents,
    held_out_documents,
    paragraphs,
    survey,
)


def sides(corpus: Corpus) -> tuple[set[str], set[str]]:
    plan = survey(corpus)
    counted = [d.text for d in counted_documents(corpus, plan)]
    held_out = [d.text for d in held_out_documents(corpus, plan)]
    assert len(counted) + len(held_out) == plan.num_documents
    return set(counted), set(held_out)


def test_split_is_a_partition_by_content(corpus_dir: Path) -> None:
    counted, held_out = sides(find_corpus([corpus_dir]))
    assert counted
    assert held_out
    assert not counted & held_out
    assert 1 <= len(held_out) <= 15


def test_names_order_and_copies_do_not_matter(corpus_dir: Path, tmp_path: Path) -> None:
    first = find_corpus([corpus_dir])
    files = sorted(corpus_dir.glob("[0-9]*.txt"))
    other = tmp_path / "other"
    other.mkdir()
    for number, path in enumerate(reversed(files)):
        shutil.copy(path, other / f"{number}.txt")
    second = find_corpus([corpus_dir / "deep", other])
    assert sides(first) == sides(second)
    assert survey(first).corpus_digest == survey(second).corpus_digest


def test_digest_tells_corpora_apart(corpus_dir: Path) -> None:
    before = survey(find_corpus([corpus_dir])).corpus_digest
    (corpus_dir / "00.txt").write_text("changed")
    assert survey(find_corpus([corpus_dir])).corpus_digest != before


def test_a_copied_document_changes_the_digest_but_not_the_sides(corpus_dir: Path) -> None:
    before = survey(find_corpus([corpus_dir]))
    held = sides(find_corpus([corpus_dir]))
    shutil.copy(corpus_dir / "00.txt", corpus_dir / "copy.txt")
    assert sides(find_corpus([corpus_dir])) == held
    assert survey(find_corpus([corpus_dir])).corpus_digest != before.corpus_digest


def test_one_document_is_split_by_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {n}\nsecond line" for n in range(50)))
    plan = survey(find_corpus([path]))
    assert plan.is_by_paragraph
    assert plan.num_documents == 50
    counted, held_out = sides(find_corpus([path]))
    assert counted
    assert held_out


def test_few_paragraphs_are_split_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("one\ntwo\n\nthree\nfour\n")
    assert survey(find_corpus([path])).num_documents == 4


def test_one_paragraph_holds_nothing_out(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("a single line")
    plan = survey(find_corpus([path]))
    assert not plan.has_held_out
    counted, held_out = sides(find_corpus([path]))
    assert (counted, held_out) == ({"a single line"}, set())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=6, unique=True))
def test_two_texts_always_give_two_sides(texts: list[str]) -> None:
    corpus = _Listed(texts)
    plan = survey(corpus)  # type: ignore[arg-type]
    held = [plan.is_held_out(Document(text=text, where="x")) for text in texts]
    assert any(held)
    assert not all(held)


class _Listed:
    files = (Path("x"),)

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def documents(self) -> list[Document]:
        return [Document(text=text, where="x") for text in self._texts]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab \n\r", max_size=60))
def test_paragraphs_lose_only_white_space(text: str) -> None:
    assert "".join("".join(paragraphs(text)).split()) == "".join(text.split())
