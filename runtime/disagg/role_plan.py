"""What every process of a prefill or decode server is told of its role. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.disagg.handshake import CarrierName, FirstProposal, Role, rank_facts
from runtime.disagg.limits import Limits
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose


class RolePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a role, the same on every rank.

    Args:
        role: what the server does.
        server: its name, another one at each start.
        weights: digest of samples of the weights that it serves.
        listen_host: where ranks of a prefill server listen for decode servers.
        transport: what carries KV.
        transport_host: address of the machine of rank 0 that the carrier gives to peers.
        first_proposal: what stands for the law of a first round's drafts in rejection mode.
        transfer_timeout_s: for a carrier to finish after the last write of a prompt.
        limits: the other bounds.
    """

    role: Role
    server: str
    weights: str
    listen_host: str
    transport: CarrierName
    transport_host: str
    first_proposal: FirstProposal
    transfer_timeout_s: float
    limits: Limits


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank other than the first says of itself to the first.

    Args:
        facts: that decode and prefill servers compare, as far as this rank knows them.
        address: of its KV pool, on a decode server.
        listen: `host:port` for decode servers, on a prefill server; without a host: the first
            rank's.
        problems: why it cannot take part.
    """

    facts: dict[str, str] = {}
    address: bytes = b""
    listen: str = ""
    problems: tuple[Diagnostic, ...] = ()


def card_key(rank: int) -> str:
    """Return the key under which a world rank publishes its card."""
    return f"kv/card/{rank}"


def compare_cards(first: dict[str, str], cards: Sequence[RankCard]) -> None:
    """Refuse a server whose ranks would compute other bits than its first one.

    Args:
        first: facts of rank 0.
        cards: of the ranks from 1 on.

    Raises:
        DiagnosticError: SD871 with the first fact that differs; what a rank has met.
    """
    for rank, card in enumerate(cards, start=1):
        if card.problems:
            raise DiagnosticError(card.problems)
        for name, expected in rank_facts(first).items():
            if card.facts.get(name) != expected:
                raise DiagnosticError(
                    diagnose(
                        "SD871",
                        where=f"rank {rank}, {name}",
                        message=f"rank {rank} of this server has another `{name}` than rank 0",
                        expected=expected,
                        found=card.facts.get(name, "not stated"),
                    )
                )
