"""The carriers by name."""

from __future__ import annotations

from runtime.disagg.failures import carrier_failed
from runtime.disagg.handshake import CarrierName
from runtime.disagg.memory import MemoryTransport, SharedTransport
from runtime.disagg.mooncake import MooncakeTransport
from runtime.disagg.nixl import NixlTransport
from runtime.disagg.transport import Transport
from specctl.contract.diagnostics import DiagnosticError


def make_transport(name: CarrierName, *, host: str) -> Transport:
    """Start a carrier between processes.

    Args:
        name: which one.
        host: address of this machine at which peers reach `mooncake`.

    Raises:
        DiagnosticError: SD863, its package is not installed, it does not start, or it cannot join
            processes (`memory`).
    """
    if name == "shared":
        return SharedTransport()
    if name == "nixl":
        return NixlTransport()
    if name == "mooncake":
        return MooncakeTransport(host)
    assert name == MemoryTransport.name, f"no carrier is called {name}"
    raise DiagnosticError(
        carrier_failed(
            name,
            "two processes",
            help="Use `--transport shared` on one machine, `nixl` or `mooncake` between machines",
        )
    )
