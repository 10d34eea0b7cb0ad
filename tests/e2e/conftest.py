"""One tiny pair on disk and one server for all tests that leave it running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, live_server
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import tiny_manifest, write_manifest

CONTEXT = 2048


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifest of a tiny target with a long context and its draft."""
    directory = tmp_path_factory.mktemp("pair")
    target = write_tiny_target(
        directory / "tiny-target", num_layers=2, max_position_embeddings=CONTEXT
    )
    draft = write_tiny_eagle3(
        directory / "draft", target, boundary_ids=(0, 1, 2), max_position_embeddings=CONTEXT
    )
    return write_manifest(directory, tiny_manifest(target, draft))


@pytest.fixture(scope="session")
def server(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with live_server(tiny_pair, log, "--max-num-requests", "8") as running:
        yield running
