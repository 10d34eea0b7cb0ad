"""What `serve` refuses before it loads a model, and what it does just before it answers."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import Overrides
from runtime.server.run import check_address
from runtime.server.settings import ServeOptions, settle
from runtime.server.start import serve_manifest, settle_heap
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from tests.ports import free_port

MANIFEST = Path(__file__).parents[4] / "fixtures" / "manifests" / "v1" / "speculators-eagle3.yaml"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of this machine on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(host: str, port: int) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        check_address(host, port)
    (found,) = caught.value.diagnostics
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_free_address_passes_and_stays_free(host: str) -> None:
    port = free_port()
    check_address(host, port)
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)


def test_a_taken_port_is_named(taken: int) -> None:
    found = refused("127.0.0.1", taken)
    assert (found.code, found.where) == ("SD835", "--port")
    assert str(found.found).startswith(f"127.0.0.1:{taken}: Address already in use")


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    found = refused(host, 0)
    assert (found.code, found.where) == ("SD835", "--host")
    assert host in str(found.found)


def test_the_address_is_checked_before_the_model_is_loaded(taken: int) -> None:
    never = Overrides(device="tpu")
    with pytest.raises(DiagnosticError) as caught:
        serve_manifest(
            MANIFEST, never, ServeOptions(port=taken), on_diagnostic=lambda diagnostic: None
        )
    assert [found.code for found in caught.value.diagnostics] == ["SD835"]


def test_a_model_needs_a_name() -> None:
    with pytest.raises(DiagnosticError) as caught:
        settle(ServeOptions(model_name=""), target_name="tiny")
    (found,) = caught.value.diagnostics
    assert (found.code, found.where) == ("SD832", "--served-model-name")


def test_later_collections_leave_out_what_the_start_made() -> None:
    kept = [[number] for number in range(1000)]
    try:
        settle_heap()
        known = {id(item) for item in gc.get_objects()}
        assert not known & {id(item) for item in kept}
        assert gc.get_freeze_count() > len(kept)
    finally:
        gc.unfreeze()
