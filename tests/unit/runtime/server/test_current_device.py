"""The GPU that was asked for is the current one of every thread that launches kernels."""

from __future__ import annotations

import threading

import pytest
import torch

from runtime.config import Overrides
from runtime.config.devices import settle_device
from runtime.config.ledger import Ledger
from runtime.engine.stage_process import local_device
from runtime.parallel.launch import Launch
from runtime.server.loop import EngineLoop
from tests.unit.runtime.server.scripted_engine import ScriptedEngine


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.device]]:
    """Pretend that there are two GPUs; returns which thread made which one its current one."""
    calls: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: calls.append((threading.current_thread().name, device)),
    )
    return calls


@pytest.mark.parametrize(
    ("given", "index"), [("cuda:1", 1), ("cuda", 0), ("auto", 0), ("cpu", None), ("cuda:2", None)]
)
def test_who_settles_the_device_makes_it_the_current_one(
    made_current: list[tuple[str, torch.device]], given: str, index: int | None
) -> None:
    device = settle_device(Ledger(Overrides(device=given)))
    here = threading.current_thread().name
    assert made_current == ([] if index is None else [(here, torch.device("cuda", index))])
    assert device == (torch.device("cpu") if index is None else torch.device("cuda", index))


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("cpu"), None], ids=str)
def test_the_engine_s_thread_makes_it_its_own(
    made_current: list[tuple[str, torch.device]], device: torch.device | None
) -> None:
    loop = EngineLoop(ScriptedEngine(), device=device)
    loop.start()
    loop.stop(timeout_s=10)
    assert not loop.is_alive
    is_gpu = device is not None and device.type == "cuda"
    assert made_current == ([("engine", device)] if is_gpu else [])


def test_a_launched_rank_takes_the_gpu_of_its_local_rank(
    made_current: list[tuple[str, torch.device]],
) -> None:
    launch = Launch(rank=3, world_size=4, local_rank=3, local_world_size=4)
    assert local_device("cuda", launch) == torch.device("cuda", 1)
    assert [device for _, device in made_current] == [torch.device("cuda", 1)]
