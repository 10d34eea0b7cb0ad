"""Counting again: what of an earlier run is used, what is done anew, what is refused."""

from __future__ import annotations

import gzip
import importlib.util
import os
from pathlib import Path

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap import count_corpus as counting
from specctl.tokenmap import readers, worker
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, CountResult, count_corpus
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.sources import Task, find_files, plan_tasks
from specctl.tokenmap.worker import Job
from tests.tiny_tokenizers import tokenizer_json

needs_arrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow (extra tokenmap) is not installed"
)
needs_numpy = pytest.mark.skipif(
    importlib.util.find_spec("numpy") is None, reason="numpy (extra tokenmap) is not installed"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> LoadedTokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json("smollm2"), "utf-8")
    return load_tokenizer(path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(30):
        (root / f"{number}.txt").write_text(f"A text with {number} in it, and more.", "utf-8")
    return root


def run(corpus: Path, tokenizer: LoadedTokenizer, **options: object) -> CountResult:
    return count_corpus(
        CorpusSpec(sources=(str(corpus),)),
        tokenizer,
        CountOptions(**{"workers": 1, **options}),  # type: ignore[arg-type]
    )


@needs_arrow
def test_parts_of_the_fast_way_are_counted_anew_by_the_other(
    corpus: Path, tokenizer: LoadedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "plan_tasks", lambda files: plan_tasks(files, task_bytes=300))
    path = tmp_path / "corpus.counts"
    real, done = counting.run_task, []

    def stopped(job: Job, task: Task) -> int:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(real(job, task))
        return done[-1]

    with monkeypatch.context() as patch:
        patch.setattr(counting, "run_task", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tokenizer, counts=path)
    resumed = run(corpus, tokenizer, counts=path, method="batch").artefact
    whole = run(corpus, tokenizer, method="batch").artefact
    assert (resumed.counted, resumed.held_out) == (whole.counted, whole.held_out)


@needs_arrow
@pytest.mark.parametrize("num_bytes", [0, 10_000])
def test_texts_around_added_tokens_are_encoded_by_worker_or_caller(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    for number in range(4):
        text = f"Before it, {number} words <|end|> and after\n" * 3
        (corpus / f"marked{number}.txt").write_text(text, "utf-8")
    whole = run(corpus, tokenizer, method="batch").artefact
    real, parts = counting.read_part, []

    def kept(path: Path) -> object:
        parts.append(real(path))
        return parts[-1]

    monkeypatch.setattr(worker, "_LEFT_BYTES", num_bytes)
    monkeypatch.setattr(counting, "read_part", kept)
    fast = run(corpus, tokenizer).artefact
    assert (fast.counted, fast.held_out) == (whole.counted, whole.held_out)
    groups = [result for part in parts if part is not None for result in part[1].values()]
    assert any(result.whole for result in groups) == bool(num_bytes)
    assert any(result.ids for result in groups) != bool(num_bytes)


def test_what_was_left_out_is_said_again(
    corpus: Path, tokenizer: LoadedTokenizer, tmp_path: Path
) -> None:
    (corpus / "bad.txt").write_bytes(b"\0binary")
    path = tmp_path / "corpus.counts"
    first = run(corpus, tokenizer, counts=path)
    assert [d.code for d in first.diagnostics] == ["SD434"]
    assert run(corpus, tokenizer, counts=path) == first


@needs_numpy
def test_a_count_file_of_token_ids_is_used_again_and_not_overwritten(
    corpus: Path, tokenizer: LoadedTokenizer, tmp_path: Path
) -> None:
    import numpy as np

    ids, path = tmp_path / "ids.npy", tmp_path / "ids.counts"
    np.save(ids, np.arange(50))
    first = run(ids, tokenizer, counts=path)
    assert run(ids, tokenizer, counts=path).artefact == first.artefact
    with pytest.raises(DiagnosticError) as caught:
        run(corpus, tokenizer, counts=path)
    assert [d.code for d in caught.value.diagnostics] == ["SD433"]
    text_counts = tmp_path / "corpus.counts"
    run(corpus, tokenizer, counts=text_counts)
    before = text_counts.read_bytes()
    with pytest.raises(DiagnosticError) as caught:
        run(ids, tokenizer, counts=text_counts)
    assert [d.code for d in caught.value.diagnostics] == ["SD433"]
    assert text_counts.read_bytes() == before


def test_a_packed_file_is_known_by_its_name_in_capitals(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    root.mkdir()
    line = b'{"text": "one line"}\n'
    (root / "a.jsonl").write_bytes(line)
    (root / "B.JSONL.GZ").write_bytes(gzip.compress(line))
    kinds = {file.kind for file in find_files([str(root)])}
    assert kinds == {".jsonl"}


@needs_arrow
def test_what_stands_before_a_defect_belongs_to_the_corpus(
    tokenizer: LoadedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 64)
    root = tmp_path / "corpus"
    root.mkdir()
    texts = ["one word after another " * 20, "other words in this text " * 20]
    (root / "other.txt").write_text("another file", "utf-8")
    digests = set()
    for text in texts:
        (root / "a.txt").write_bytes(text.encode() + b"\xff")
        result = run(root, tokenizer)
        assert "SD434" in [d.code for d in result.diagnostics]
        sides = (result.artefact.counted, result.artefact.held_out)
        assert sum(side.num_documents for side in sides) == 2
        digests.add(result.artefact.facts.corpus_digest)
    assert len(digests) == 2


def test_half_surrogate_pairs_are_counted_and_said(
    corpus: Path, tokenizer: LoadedTokenizer
) -> None:
    before = run(corpus, tokenizer).artefact
    (corpus / "a.jsonl").write_bytes(b'{"text": "x \\ud800"}\n')
    result = run(corpus, tokenizer)
    assert [d.code for d in result.diagnostics] == ["SD430"]
    assert result.diagnostics[0].where.endswith("a.jsonl#1")
    documents = [
        sum(side.num_documents for side in (found.counted, found.held_out))
        for found in (before, result.artefact)
    ]
    assert documents == [30, 31]


@pytest.mark.parametrize("change", ["written", "gone"])
def test_a_corpus_that_changes_meanwhile_is_refused(
    corpus: Path,
    tokenizer: LoadedTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    real = counting.run_task

    def meanwhile(job: Job, task: Task) -> int:
        number = real(job, task)
        if change == "gone":
            (corpus / "3.txt").unlink()
        else:
            os.utime(corpus / "3.txt", ns=(1, 1))
        return number

    monkeypatch.setattr(counting, "run_task", meanwhile)
    with pytest.raises(DiagnosticError) as caught:
        run(corpus, tokenizer, counts=tmp_path / "corpus.counts")
    assert [d.code for d in caught.value.diagnostics] == ["SD429"]
    assert not (tmp_path / "corpus.counts").exists()


@needs_arrow
def test_damaged_zstd_is_named(corpus: Path, tokenizer: LoadedTokenizer) -> None:
    (corpus / "bad.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04")
    (found,) = run(corpus, tokenizer).diagnostics
    assert found.code == "SD434"
    assert found.notes[0].startswith("1 x compressed data that is damaged or cut off")
