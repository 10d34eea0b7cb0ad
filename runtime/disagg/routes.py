"""Ways from one rank of a prefill server to the decode servers that arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runtime.disagg.handshake import Layout
from runtime.disagg.listen import Arrived
from runtime.disagg.outbox import Route, pieces_of
from runtime.disagg.reshard import Side, plan_moves
from runtime.disagg.transport import Transport
from runtime.kv import KVLayer


def side_of(name: str, layout: Layout) -> Side:
    """Return how a side of this layout holds KV."""
    return Side(
        name=name,
        stage_layers=layout.stage_layers,
        tensor_parallel=layout.tensor_parallel,
        is_draft_split=layout.is_draft_split,
    )


class Routes:
    """Plans and opens the ways of one rank."""

    def __init__(
        self,
        transport: Transport,
        *,
        layout: Layout,
        rank: int,
        kv_heads: Sequence[int],
        pool: Sequence[KVLayer],
        may_write: Callable[[str], bool],
    ) -> None:
        """Open nothing yet.

        Args:
            transport: carries KV.
            layout: of this side.
            rank: world rank of this process.
            kv_heads: KV heads of each target layer, then of each draft layer, over all ranks.
            pool: this rank's layers.
            may_write: whether KV may still be written to a decode server, asked before each write.
        """
        self._transport = transport
        self._side = side_of("prefill", layout)
        self._rank = rank
        self._kv_heads = tuple(kv_heads)
        self._pool = tuple(pool)
        self._may_write = may_write

    def __call__(self, arrived: Arrived) -> Route:
        """Return the way to a decode server.

        Raises:
            DiagnosticError: SD862, its ranks or ours do not divide the heads; SD863, an address of
                its pools means nothing here.
        """
        decode = side_of("decode", arrived.theirs.layout)
        moves = plan_moves(self._side, decode, self._kv_heads)
        pieces = pieces_of(moves, rank=self._rank, prefill=self._side, decode=decode)
        wanted = sorted({piece.destination for parts in pieces.values() for piece in parts})
        addresses = arrived.offer.addresses
        return Route(
            pieces=pieces,
            links={rank: self._transport.connect(addresses[rank], self._pool) for rank in wanted},
            may_write=lambda: self._may_write(arrived.peer),
        )
