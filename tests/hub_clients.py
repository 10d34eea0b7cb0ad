"""What tests of hub sources share: repositories, clients that talk to a local hub, and a clock."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.checkpoint import Checkpoint
from specctl.checkpoint.directory import read_store
from specctl.checkpoint.sources.opening import open_store
from specctl.contract.diagnostics import DiagnosticError
from tests.mock_hub import TOKEN, MockHub, Sparse, header, safetensors

GIB = 1 << 30
CONFIG = b'{"hidden_size": 16}'
TENSORS = {"a.weight": ("BF16", [4, 4], 32), "d2t": ("I64", [3], 24)}
IDS = (5, 0, 7)
DATA = bytes(range(32)) + b"".join(i.to_bytes(8, "little") for i in IDS)
SMALL = {"config.json": CONFIG, "model.safetensors": safetensors(TENSORS, DATA)}


def point_clients(hub: MockHub, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both clients talk to `hub` only, without any login, with caches below `directory`."""
    import huggingface_hub.constants as constants

    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hub.endpoint)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(directory / "ms"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(directory / "ms-home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory / "hf"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(directory / "no-token"))


def need_modelscope() -> None:
    """Skip (fail under CI) without the client."""
    if importlib.util.find_spec("modelscope_hub") is None:
        reason = "the ModelScope client is not installed (extra `modelscope`)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


class Clock:
    """Counts what would have been waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits.append(seconds)


def opened(source: str, clock: Clock | None = None) -> Checkpoint:
    return read_store(open_store(source, pause=clock or Clock()), where=source)


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """Return code and text of the first diagnostic that `call` raises."""
    with pytest.raises(DiagnosticError) as caught:
        call()
    first = caught.value.diagnostics[0]
    return first.code, f"{first.where} {first.message} {first.help}"


def log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)


def sharded(num_shards: int, size: int) -> dict[str, bytes | Sparse]:
    names = [f"model-{i:05}-of-{num_shards:05}.safetensors" for i in range(1, num_shards + 1)]
    files: dict[str, bytes | Sparse] = {"config.json": CONFIG}
    entries = []
    for number, name in enumerate(names):
        head = header({f"layers.{number}.weight": ("U8", [size], size)})
        files[name] = Sparse(head, len(head) + size)
        entries.append(f'"layers.{number}.weight": "{name}"')
    files["model.safetensors.index.json"] = (
        '{"weight_map": {' + ", ".join(entries) + "}}"
    ).encode()
    return files
