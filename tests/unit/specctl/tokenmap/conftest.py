"""The tiny tokenizer and corpus as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from tests.tiny_corpus import write_corpus, write_target


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tokenizer(target_dir: Path) -> LoadedTokenizer:
    return load_tokenizer(target_dir / "tokenizer.json")


@pytest.fixture
def corpus_dir(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")
