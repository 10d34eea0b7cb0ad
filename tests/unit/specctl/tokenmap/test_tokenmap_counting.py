"""A tokenizer is loaded to count with, or refused with a code."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer


def test_truncation_and_padding_of_the_file_are_off(tokenizer: LoadedTokenizer) -> None:
    long, short = tokenizer.handle.encode_batch(["xyz " * 50, "x"], add_special_tokens=False)
    assert len(long.ids) > 16
    assert len(short.ids) == 1


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
