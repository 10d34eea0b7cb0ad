"""Tests against Speculators 0.9.0 itself, in an environment of its own.

`SPECCTL_SPECULATORS_PYTHON` names the Python that has it; `docs/contributing.md` has the recipe and
the nightly script makes the environment. Without the variable these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.third_party.library import Library

VARIABLE = "SPECCTL_SPECULATORS_PYTHON"


@pytest.fixture(scope="session")
def library() -> Iterator[Library]:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} does not name a Python with speculators 0.9.0")
    running = Library(python)
    yield running
    running.close()


@pytest.fixture
def checkpoints() -> Path:
    return Path(__file__).parents[2] / "fixtures" / "checkpoints"
