"""Fixtures that write a checkpoint directory and open it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from container_files import safetensors_bytes, table

from specctl.checkpoint import Checkpoint, open_checkpoint
from tests.hub_clients import SMALL, need_modelscope, point_clients
from tests.mock_hub import MockHub, Repo, serving


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "draft"
    root.mkdir()
    (root / "config.json").write_text('{"hidden_size": 16}')
    return root


@pytest.fixture
def single(directory: Path) -> Callable[..., Checkpoint]:
    """Write `model.safetensors` from raw bytes or (header, data) and open the directory."""

    def build(content: object, data: bytes | None = None) -> Checkpoint:
        raw = content if data is None else safetensors_bytes(content, data)
        assert isinstance(raw, bytes)
        (directory / "model.safetensors").write_bytes(raw)
        return open_checkpoint(directory)

    return build


@pytest.fixture
def sharded(directory: Path) -> Callable[..., Checkpoint]:
    """Write an index (object or bytes) and shards (name -> tensor names) and open them."""

    def build(index: object, shards: dict[str, tuple[str, ...]]) -> Checkpoint:
        raw = index if isinstance(index, bytes) else json.dumps(index).encode()
        (directory / "model.safetensors.index.json").write_bytes(raw)
        for name, keys in shards.items():
            (directory / name).write_bytes(safetensors_bytes(*table(*keys)))
        return open_checkpoint(directory)

    return build


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockHub]:
    """A hub with `org/small`, which both clients are pointed at, without any login."""
    with serving({"org/small": Repo(files=dict(SMALL))}) as server:
        point_clients(server, tmp_path, monkeypatch)
        yield server


@pytest.fixture(params=["hf", "ms"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ms":
        need_modelscope()
        import modelscope_hub._legacy_api as client

        monkeypatch.setattr(client, "REPO_TREE_PAGE_RETRY_MAX_DELAY_SECONDS", 0)
    return str(request.param)
