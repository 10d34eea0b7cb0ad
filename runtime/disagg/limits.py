"""How long a prefill and a decode server wait for each other before they act.

*Lost*: a connection that ended, or on which nothing came for `silence_s`; both sides beat several
times within that time. *Fenced*: nothing is written any more for a request of a lost peer. A peer
whose connection ended writes nothing afterwards but what is on its way (`fence_s`); one that fell
silent may live, and stops by itself when it has heard nothing for `silence_s` either.
"""

from __future__ import annotations

from dataclasses import dataclass

BEATS_PER_SILENCE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds, each one a bound.

    Args:
        connect_s: for a TCP connection, and for each step of its greeting.
        retry_s: between two attempts to connect.
        silence_s: without a byte from the peer before it counts as lost.
        peer_wait_s: that a request waits while no peer is connected.
        prefill_s: for a prefill, from asking to the last byte of KV.
        release_s: for a peer to say that it writes nothing more for an aborted request.
        fence_s: from the end of a connection until nothing of the peer is on its way.
        linger_s: that a write which a peer has started may still arrive, should the network to it
            come back; the carrier's own.
        max_tries: peers that may be lost under one request before it ends: a request that brings
            servers down must not bring down all of them.
    """

    connect_s: float = 5.0
    retry_s: float = 0.5
    silence_s: float = 10.0
    peer_wait_s: float = 5.0
    prefill_s: float = 120.0
    release_s: float = 30.0
    fence_s: float = 0.5
    linger_s: float = 0.0
    max_tries: int = 3

    def fence_after(self, *, may_write: bool) -> float:
        """Return how long blocks of a lost peer's requests stay untouched.

        Args:
            may_write: the peer may live on; by itself it starts no write after `silence_s`.
        """
        return self.fence_s + (self.silence_s + self.linger_s if may_write else 0.0)
