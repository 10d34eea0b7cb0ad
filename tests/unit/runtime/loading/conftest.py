"""Fixtures of the loading tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_pair import Pair, write_pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path)
