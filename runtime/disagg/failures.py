"""How a carrier that does not carry is reported."""

from __future__ import annotations

from specctl.contract.diagnostics import Diagnostic, diagnose


def carrier_failed(name: str, found: str, *, help: str | None = None) -> Diagnostic:
    """Return SD863 for a carrier that cannot reach a pool or did not copy."""
    return diagnose(
        "SD863",
        where=f"transport `{name}`",
        message="KV could not be written into the decode server's pool",
        expected="a pool that can be reached until the transfer ends",
        found=found,
        help=help,
    )
