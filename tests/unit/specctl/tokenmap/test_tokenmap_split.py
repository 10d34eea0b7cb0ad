"""The held-out part depends on the texts only, and neither side is ever empty without need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, CountResult, count_corpus
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.split import paragraphs


def count(tokenizer: LoadedTokenizer, *sources: Path, held_out: float = 0.1) -> CountResult:
    spec = CorpusSpec(sources=tuple(str(source) for source in sources), held_out=held_out)
    return count_corpus(spec, tokenizer, CountOptions(workers=1))


def sizes(result: CountResult) -> tuple[int, int]:
    sides = (result.artefact.counted, result.artefact.held_out)
    return sides[0].num_documents, sides[1].num_documents


def digest(result: CountResult) -> str:
    return result.artefact.facts.corpus_digest


def test_split_is_a_partition_by_content(corpus_dir: Path, tokenizer: LoadedTokenizer) -> None:
    counted, held_out = sizes(count(tokenizer, corpus_dir))
    assert counted + held_out == 61
    assert 1 <= held_out <= 15


def test_names_and_order_do_not_matter(
    corpus_dir: Path, tokenizer: LoadedTokenizer, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "corpus"
    other.mkdir(parents=True)
    for number, path in enumerate(sorted(corpus_dir.glob("[0-9]*.txt"), reverse=True)):
        shutil.copy(path, other / f"{number}.txt")
    (corpus_dir / "ignored.py").unlink()
    shutil.rmtree(corpus_dir / "deep")
    first, second = count(tokenizer, corpus_dir), count(tokenizer, other)
    assert (first.artefact.counted, first.artefact.held_out) == (
        second.artefact.counted,
        second.artefact.held_out,
    )
    assert digest(first) == digest(second)
    shutil.copy(other / "0.txt", other / "copy.txt")
    third = count(tokenizer, other)
    assert digest(third) != digest(second)
    assert sum(sizes(third)) == sum(sizes(second)) + 1
    assert 0 in (a - b for a, b in zip(sizes(third), sizes(second), strict=True))


def test_digest_tells_corpora_apart(corpus_dir: Path, tokenizer: LoadedTokenizer) -> None:
    before = digest(count(tokenizer, corpus_dir))
    (corpus_dir / "00.txt").write_text("changed")
    assert digest(count(tokenizer, corpus_dir)) != before


def test_one_document_is_split_by_paragraphs(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {n}\nsecond line" for n in range(50)))
    counted, held_out = sizes(count(tokenizer, path))
    assert counted + held_out == 50
    assert min(counted, held_out) > 0


def test_few_paragraphs_are_split_by_lines(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("one\ntwo\n\nthree\nfour\n")
    assert sum(sizes(count(tokenizer, path))) == 4


@pytest.mark.parametrize("held_out", [0.001, 0.999])
def test_one_paragraph_is_counted_whatever_the_share(
    tmp_path: Path, tokenizer: LoadedTokenizer, held_out: float
) -> None:
    path = tmp_path / "line.txt"
    path.write_text("a single line")
    result = count(tokenizer, path, held_out=held_out)
    assert sizes(result) == (1, 0)
    assert [d.code for d in result.diagnostics] == ["SD427"]


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    texts=st.lists(st.text("ab1", min_size=1, max_size=5), min_size=2, max_size=6, unique=True),
    held_out=st.sampled_from([0.01, 0.1, 0.9]),
)
def test_two_texts_always_give_two_sides(
    tmp_path: Path, tokenizer: LoadedTokenizer, texts: list[str], held_out: float
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    assert min(sizes(count(tokenizer, path, held_out=held_out))) > 0


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab \n\r", max_size=60))
def test_paragraphs_lose_only_white_space(text: str) -> None:
    assert "".join("".join(paragraphs(text)).split()) == "".join(text.split())
