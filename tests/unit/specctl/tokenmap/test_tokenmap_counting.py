"""Counts are exact, whatever the batches and the tokenizer's own truncation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap import counting
from specctl.tokenmap.counting import LoadedTokenizer, TokenizersCounter, load_tokenizer
from specctl.tokenmap.documents import Document, find_corpus


def naive(tokenizer: LoadedTokenizer, texts: list[str]) -> dict[int, int]:
    """Count one text at a time: the slow version."""
    result: Counter[int] = Counter()
    for text in texts:
        result.update(tokenizer.handle.encode(text, add_special_tokens=False).ids)
    return dict(result)


def test_counts_equal_the_slow_version(
    tokenizer: LoadedTokenizer, corpus_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = list(find_corpus([corpus_dir]).documents())
    expected = naive(tokenizer, [d.text for d in documents])
    for batch_bytes in (1, 500, 1 << 20):
        monkeypatch.setattr(counting, "_BATCH_BYTES", batch_bytes)
        seen: list[int] = []
        counts = TokenizersCounter(tokenizer).count(
            documents, corpus_digest="sha256:x", advance=seen.append
        )
        assert {i: n for i, n in enumerate(counts.per_id) if n} == expected
        assert counts.num_tokens == sum(expected.values())
        assert counts.num_documents == len(documents)
        assert sum(seen) == sum(len(d.text.encode()) for d in documents)
    assert len(counts.per_id) == tokenizer.size
    assert counts.tokenizer_digest == tokenizer.digest
    assert counts.corpus_digest == "sha256:x"


def test_truncation_and_padding_of_the_file_are_off(tokenizer: LoadedTokenizer) -> None:
    text = "xyz " * 50
    counts = TokenizersCounter(tokenizer).count(
        [Document(text=text, where="x")], corpus_digest="sha256:x"
    )
    assert counts.num_tokens == len(tokenizer.handle.encode(text, add_special_tokens=False).ids)
    assert counts.num_tokens > 16


def test_no_document_gives_zeros(tokenizer: LoadedTokenizer) -> None:
    counts = TokenizersCounter(tokenizer).count([], corpus_digest="sha256:x")
    assert (counts.num_tokens, counts.num_documents, sum(counts.per_id)) == (0, 0, 0)


def test_older_packages_use_the_plain_batch(tokenizer: LoadedTokenizer) -> None:
    class Old:
        encode_batch = staticmethod(tokenizer.handle.encode_batch)

    old = LoadedTokenizer(
        path=tokenizer.path,
        digest=tokenizer.digest,
        size=tokenizer.size,
        handle=Old(),  # type: ignore[arg-type]
    )
    documents = [Document(text="the quick fox", where="x")]
    assert (
        TokenizersCounter(old).count(documents, corpus_digest="").per_id
        == TokenizersCounter(tokenizer).count(documents, corpus_digest="").per_id
    )


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_sd425(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(raw)
    with pytest.raises(DiagnosticError) as caught:
        load_tokenizer(path)
    assert caught.value.diagnostics[0].code == "SD425"


def test_an_empty_vocabulary_is_sd425(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DiagnosticError, match="the vocabulary is empty"):
        load_tokenizer(tmp_path / "tokenizer.json")
