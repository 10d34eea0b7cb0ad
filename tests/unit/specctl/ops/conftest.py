"""The tiny fixtures by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[4] / "fixtures"
CHECKPOINTS = FIXTURES / "checkpoints"


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], str]:
    """Return the directory of a fixture, as a user would write it."""

    def named(name: str) -> str:
        directory = CHECKPOINTS / name
        assert directory.is_dir(), f"no fixture {name}; python fixtures/make_fixtures.py"
        return str(directory)

    return named


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a fixture that may be changed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(CHECKPOINTS / name, tmp_path / name))

    return copy
