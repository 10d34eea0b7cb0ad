"""How KV that does not arrive is reported."""

from __future__ import annotations

from specctl.contract.diagnostics import Diagnostic, diagnose


def not_written(where: str, found: str, *, help: str | None = None) -> Diagnostic:
    """Return SD863 for KV that did not reach the decode server's pool.

    Args:
        where: what failed: a carrier, the line to the peer, another rank, the device.
        found: how.
        help: what to do; None: what the code says.
    """
    return diagnose(
        "SD863",
        where=where,
        message="KV could not be written into the decode server's pool",
        expected="a pool that can be reached until the transfer ends",
        found=found,
        help=help,
    )


def carrier_failed(name: str, found: str, *, help: str | None = None) -> Diagnostic:
    """Return SD863 for a carrier that cannot reach a pool or did not copy."""
    return not_written(f"transport `{name}`", found, help=help)
