"""What NIXL raises is SD863; what we get wrong ourselves is not taken for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import msgspec
import pytest
import torch

from runtime.disagg.nixl import NixlTransport, _Address, library_errors
from runtime.disagg.ranges import places_of
from runtime.kv import KVLayer
from specctl.contract.diagnostics import DiagnosticError


class RemoteError(Exception):
    """As the binding makes them: of no base class of its own."""


class FakeAgent:
    """An agent whose peers fail."""

    __module__ = "made_up_nixl._api"
    error: Callable[[], Exception]

    def __init__(self, name: str, config: object) -> None:
        del name, config

    def register_memory(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def add_remote_agent(self, metadata: bytes) -> str:
        raise type(self).error()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The meta package's module, which has its agent from another package."""
    package, binding = ModuleType("made_up_nixl"), ModuleType("made_up_nixl._bindings")
    binding.RemoteError = RemoteError  # type: ignore[attr-defined]
    binding.version = "1"  # type: ignore[attr-defined]
    meta = ModuleType("nixl._api")
    meta.nixl_agent = FakeAgent  # type: ignore[attr-defined]
    meta.nixl_agent_config = dict  # type: ignore[attr-defined]
    for module in (package, binding):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", meta)
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "")
    return meta


def pool() -> tuple[KVLayer, ...]:
    return (KVLayer(k=torch.zeros(2, 1, 4, 8), v=torch.zeros(2, 1, 4, 8)),)


def connect(error: Callable[[], Exception]) -> None:
    FakeAgent.error = staticmethod(error)  # type: ignore[assignment]
    layers = pool()
    address = _Address(metadata=b"m", layers=places_of(layers))
    NixlTransport().connect(msgspec.msgpack.encode(address), layers)


def test_errors_are_those_of_the_package_that_the_agent_comes_from(api: ModuleType) -> None:
    assert library_errors(api) == (RuntimeError, RemoteError)


@pytest.mark.usefixtures("api")
@pytest.mark.parametrize("kind", [RemoteError, RuntimeError])
def test_what_the_library_raises_is_a_carrier_that_failed(kind: type[Exception]) -> None:
    with pytest.raises(DiagnosticError) as caught:
        connect(lambda: kind("the peer is gone"))
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.found) == ("SD863", "the peer is gone")


@pytest.mark.usefixtures("api")
def test_another_error_is_ours() -> None:
    with pytest.raises(AttributeError, match="no such name"):
        connect(lambda: AttributeError("no such name"))
