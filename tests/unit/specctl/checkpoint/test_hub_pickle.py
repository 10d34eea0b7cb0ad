"""PyTorch files on a hub: their tables and tensors by ranged reads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from specctl.checkpoint import open_checkpoint
from tests.mock_hub import MockHub, Repo

torch = pytest.importorskip("torch", reason="torch writes the archives that are read here")


def state_file(num_tensors: int, size: int) -> bytes:
    state = {f"layers.{i}.weight": torch.full((size,), i % 251, dtype=torch.uint8)
             for i in range(num_tensors)}  # fmt: skip
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def test_the_same_tensors_as_on_disk(hub: MockHub, kind: str, tmp_path: Path) -> None:
    content = state_file(20, 1 << 18)
    hub.repos["org/bin"] = Repo(files={"config.json": b"{}", "pytorch_model.bin": content})
    local = tmp_path / "local"
    local.mkdir()
    (local / "config.json").write_bytes(b"{}")
    (local / "pytorch_model.bin").write_bytes(content)
    remote, on_disk = open_checkpoint(f"{kind}:org/bin"), open_checkpoint(local)
    assert dict(remote.tensors) == dict(on_disk.tensors)
    assert remote.files == on_disk.files
    assert hub.num_bytes < len(content) // 4
    assert remote.read_range("pytorch_model.bin", *span(remote, 7)) == bytes([7]) * 100


def span(checkpoint: object, number: int) -> tuple[int, int]:
    entry = checkpoint.tensors[f"layers.{number}.weight"]  # type: ignore[attr-defined]
    return entry.begin, entry.begin + 100


def test_too_many_tensors_ask_for_a_download(hub: MockHub, kind: str) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": state_file(400, 1024)}
    hub.repos["org/bin"] = Repo(files=files)
    found = open_checkpoint(f"{kind}:org/bin")
    assert [d.code for d in found.diagnostics] == ["SD149"]
    assert "hf download" in str(found.diagnostics[0].help)
    assert len([s for s in hub.of("pytorch_model.bin") if s.host == "cdn"]) < 5
