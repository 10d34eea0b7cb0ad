"""Settings of a prefill or decode server beside those of every server. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from runtime.disagg.handshake import CarrierName, FirstProposal, Role
from runtime.disagg.limits import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleOptions:
    """Which half of the work a server does, and how it meets the other one.

    Args:
        role: what it does.
        listen: `host:port` for decode servers; of a prefill server.
        peers: `host:port` of each prefill server; of a decode server.
        transport: what carries KV.
        transport_host: address of this machine that the carrier gives to peers.
        first_proposal: what stands for the law of a first round's drafts in rejection mode.
        transfer_timeout_s: for a carrier to finish after the last write of a prompt.
        limits: the other bounds.
    """

    role: Role
    listen: str | None = None
    peers: tuple[str, ...] = ()
    transport: CarrierName = "shared"
    transport_host: str = "127.0.0.1"
    first_proposal: FirstProposal = "one_hot"
    transfer_timeout_s: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def described(self) -> dict[str, object]:
        """Return them for `/info`."""
        return asdict(self)
