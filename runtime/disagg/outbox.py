"""What one rank of a prefill server sends of its requests, layer by layer.

A `Route` says which heads of each layer of this rank go where on one decode server; it follows from
the two layouts. A `Transfer` sends the blocks of one request along a route: of each layer every
block once, when all of its positions are final, the last one when the prompt ends. Positions after
the prompt's end in that block hold anything: the decode side writes them before it reads them.

Layers are numbered as in `reshard`: the target's first, then the draft's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.disagg.early import EarlySender, Outcome
from runtime.disagg.failures import not_written
from runtime.disagg.reshard import HeadMove, Side
from runtime.disagg.transport import BlockMove, Link
from runtime.graphs.marks import Ready
from runtime.kv import KVLayer
from specctl.contract.diagnostics import Diagnostic, DiagnosticError

MayWrite = Callable[[], bool]
"""Whether KV may still be written to a decode server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Heads of one layer of this rank that go to one rank of the other side.

    Args:
        destination: world rank there.
        source_layer: pool layer here.
        destination_layer: pool layer there.
        source_head: first head in the layer here.
        destination_head: first head in the layer there.
        num_heads: how many.
    """

    destination: int
    source_layer: int
    destination_layer: int
    source_head: int
    destination_head: int
    num_heads: int


def pieces_of(
    moves: Sequence[HeadMove], *, rank: int, prefill: Side, decode: Side
) -> dict[int, tuple[Piece, ...]]:
    """Return what a prefill rank sends of each layer.

    Args:
        moves: from `plan_moves` for these sides.
        rank: world rank on the prefill side.
        prefill: the side that sends.
        decode: the side that gets.
    """
    found: dict[int, list[Piece]] = {}
    for move in moves:
        if move.source == rank:
            found.setdefault(move.layer, []).append(
                Piece(
                    destination=move.destination,
                    source_layer=pool_layer(prefill, move.layer),
                    destination_layer=pool_layer(decode, move.layer),
                    source_head=move.source_head,
                    destination_head=move.destination_head,
                    num_heads=move.num_heads,
                )
            )
    return {layer: tuple(pieces) for layer, pieces in found.items()}


def pool_layer(side: Side, layer: int) -> int:
    """Return where a layer is in the pool of a rank that has it: counted from its stage's first."""
    return layer - sum(side.stage_layers[: side.stage_of(layer)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """From one rank's pool to the pools of one decode server.

    Args:
        pieces: layer -> what goes where.
        links: world rank of the decode server -> way into its pool.
        may_write: asked before every write.
    """

    pieces: Mapping[int, tuple[Piece, ...]]
    links: Mapping[int, Link]
    may_write: MayWrite

    def close(self) -> None:
        """Let go of the links, after the last transfer."""
        for link in self.links.values():
            link.close()


class Passage:
    """A link as one transfer sees it: its failures are its own, and it ends when writes must."""

    def __init__(self, link: Link, may_write: MayWrite) -> None:
        """Write through `link` as long as `may_write`."""
        self.is_ordered = link.is_ordered
        self._link = link
        self._may_write = may_write

    def write(self, move: BlockMove) -> None:
        """Start to copy; see `Link.write`."""
        if not self._may_write():
            raise DiagnosticError(not_written("line to the decode server", "it was not heard of"))
        self._link.write(move)

    def finish(self, timeout_s: float) -> None:
        """Wait until all writes arrived; see `Link.finish`."""
        self._link.finish(timeout_s)

    def close(self) -> None:
        """Leave the link to other transfers."""


class Transfer:
    """The KV of one request on its way."""

    def __init__(
        self,
        route: Route,
        *,
        sender: EarlySender,
        pool: Sequence[KVLayer],
        first_block: int,
        destination_blocks: Sequence[int],
    ) -> None:
        """Send nothing yet.

        Args:
            route: where to.
            sender: whose thread writes.
            pool: this rank's layers, target's then draft's.
            first_block: of the request's table, that is sent first.
            destination_blocks: one for each block from there on, on every decode rank.
        """
        self.num_kv_bytes = 0
        self._route = route
        self._sender = sender
        self._pool = pool
        self._first_block = first_block
        self._destination_blocks = tuple(destination_blocks)
        self._num_sent = dict.fromkeys(route.pieces, 0)
        self._passages = {
            rank: Passage(route.links[rank], route.may_write)
            for rank in {piece.destination for parts in route.pieces.values() for piece in parts}
        }
        self._outcomes: tuple[Outcome, ...] = ()

    @property
    def end_block(self) -> int:
        """One past the last block of the request that is sent."""
        return self._first_block + len(self._destination_blocks)

    @property
    def is_ordered(self) -> bool:
        """Whether all of its links are; see `Link`."""
        return all(passage.is_ordered for passage in self._passages.values())

    @property
    def unsent(self) -> dict[int, int]:
        """Layer -> blocks that were not sent yet, of those that have some."""
        whole = len(self._destination_blocks)
        return {layer: whole - sent for layer, sent in self._num_sent.items() if sent < whole}

    def send(self, layer: int, table: Sequence[int], *, end_block: int, ready: Ready) -> None:
        """Send the blocks of a layer before `end_block` that were not sent.

        Args:
            layer: that this rank has, or one that goes nowhere from here.
            table: the request's blocks here.
            end_block: one past the last one that is final.
            ready: marks the end of the kernels that wrote them.
        """
        pieces = self._route.pieces.get(layer, ())
        begin = self._num_sent.get(layer, 0)
        end = min(end_block, self.end_block) - self._first_block
        if end <= begin or not pieces:
            return
        self._num_sent[layer] = end
        source = tuple(table[self._first_block + begin : self._first_block + end])
        for piece in pieces:
            move = BlockMove(
                source_layer=piece.source_layer,
                destination_layer=piece.destination_layer,
                source_head=piece.source_head,
                destination_head=piece.destination_head,
                num_heads=piece.num_heads,
                source_blocks=source,
                destination_blocks=self._destination_blocks[begin:end],
            )
            self.num_kv_bytes += move.num_bytes(self._pool[piece.source_layer])
            self._sender.send(self._passages[piece.destination], (move,), ready=ready)

    def end(self, timeout_s: float) -> None:
        """Send nothing more; the outcome follows."""
        self._outcomes = tuple(
            self._sender.end(passage, timeout_s=timeout_s) for passage in self._passages.values()
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing more is read or written for it."""
        return bool(self._outcomes) and all(outcome.is_done for outcome in self._outcomes)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of its writes; whether it came in time."""
        return all(outcome.wait(timeout_s) for outcome in self._outcomes)

    @property
    def problem(self) -> Diagnostic | None:
        """Why some of it did not arrive; None as far as is known."""
        return next((item.problem for item in self._outcomes if item.problem is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Blocks of a request that a forward makes final.

    Args:
        transfer: of the request.
        table: its blocks here.
        end_block: one past the last one that is final.
    """

    transfer: Transfer
    table: Sequence[int]
    end_block: int


def send_chunks(
    layers: Iterable[int],
    chunks: Sequence[Chunk],
    *,
    device: torch.device,
    mark_end: Callable[[torch.device], Ready],
) -> None:
    """Send layers of chunks, once the kernels that were launched for them have ended.

    Args:
        layers: as in `Transfer.send`.
        chunks: none is an answer: nothing is marked then.
        device: of the pool.
        mark_end: marks the end of what was launched.
    """
    if not chunks:
        return
    ready = mark_end(device)
    for layer in layers:
        for chunk in chunks:
            chunk.transfer.send(layer, chunk.table, end_block=chunk.end_block, ready=ready)


def wire_bytes(
    num_positions: int, *, first_position: int, kv_block_size: int, block_bytes: Sequence[int]
) -> int:
    """Return the bytes of KV that travel for one request.

    Args:
        num_positions: of its prompt.
        first_position: that the decode side does not have; a multiple of the block size.
        kv_block_size: tokens of a block.
        block_bytes: of a block of each layer, keys and values of all heads together.
    """
    num_blocks = -(-(num_positions - first_position) // kv_block_size)
    return num_blocks * sum(block_bytes)


def pool_block_bytes(pool: Sequence[KVLayer]) -> tuple[int, ...]:
    """Return the bytes of a block of each layer of a rank's pool, keys and values."""
    return tuple(2 * layer.k[0].numel() * layer.k.dtype.itemsize for layer in pool)
