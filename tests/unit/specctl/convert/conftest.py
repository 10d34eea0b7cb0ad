"""A small source for the tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from convert_files import TENSORS, make_source

from specctl.checkpoint import Checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return make_source(tmp_path / "source", TENSORS)
