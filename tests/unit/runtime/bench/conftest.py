"""A tiny pair with a manifest, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import tiny_manifest, write_manifest


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pair")
    target = write_tiny_target(directory / "target", num_layers=2)
    draft = write_tiny_eagle3(directory / "draft", target, boundary_ids=(0, 1, 2))
    return write_manifest(directory, tiny_manifest(target, draft))


@pytest.fixture(scope="session")
def tiny_target_only(tiny_pair: Path) -> Path:
    directory = tiny_pair.parent / "alone"
    directory.mkdir()
    return write_manifest(directory, tiny_manifest(tiny_pair.parent / "target"))
