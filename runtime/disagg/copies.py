"""Copies between two pools whose tensors one process can address."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from runtime.batch import on_device
from runtime.disagg.failures import carrier_failed
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer
from specctl.contract.diagnostics import DiagnosticError

_POLL_S = 20e-6
_AWAKE_S = 200e-6
"""A copy mostly ends within this; the shortest sleep would end later than that."""


class BlockIndices:
    """Block numbers as a copy needs them; every layer of a chunk asks for the same ones.

    One thread's; the newest few are kept.
    """

    _NUM_KEPT = 4

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._kept: dict[tuple[tuple[int, ...], torch.device], slice | torch.Tensor] = {}

    def of(self, blocks: tuple[int, ...], device: torch.device) -> slice | torch.Tensor:
        """Return a slice where the blocks follow each other, else int64 [number of blocks].

        Sync: none; the numbers are staged before the call returns.
        """
        found = self._kept.get((blocks, device))
        if found is None:
            found = _as_slice(blocks)
            if found is None:
                found = on_device(blocks, device=device)
            if len(self._kept) == self._NUM_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[blocks, device] = found
        return found


def copy_blocks(
    move: BlockMove,
    source: Sequence[KVLayer],
    destination: Sequence[KVLayer],
    indices: BlockIndices,
) -> None:
    """Copy what a move names; asynchronous on CUDA, in the current stream.

    Args:
        move: which heads of which blocks.
        source: the sender's pool.
        destination: the receiver's pool.
        indices: of the thread that copies.
    """
    origin, goal = source[move.source_layer], destination[move.destination_layer]
    blocks_in = indices.of(move.source_blocks, origin.k.device)
    blocks_out = indices.of(move.destination_blocks, goal.k.device)
    for read, written in ((origin.k, goal.k), (origin.v, goal.v)):
        heads = _heads(read, move.source_head, move.num_heads)
        picked = (
            heads[blocks_in] if isinstance(blocks_in, slice) else heads.index_select(0, blocks_in)
        )
        goal_heads = _heads(written, move.destination_head, move.num_heads)
        if isinstance(blocks_out, slice):
            goal_heads[blocks_out].copy_(picked)
        else:
            goal_heads.index_copy_(0, blocks_out, picked.to(written.device))


def _heads(layer: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return a view of some heads of every block."""
    return layer if count == layer.shape[1] else layer.narrow(1, first, count)


def _as_slice(blocks: tuple[int, ...]) -> slice | None:
    """Return the blocks as a slice; None where they do not follow each other."""
    run = range(blocks[0], blocks[0] + len(blocks)) if blocks else range(0)
    return slice(run.start, run.stop) if blocks == tuple(run) else None


class MappedLink:
    """Copies into a pool of another process that is mapped here."""

    is_ordered = False  # the other process launches on a stream of its own

    def __init__(
        self,
        name: str,
        source: tuple[KVLayer, ...],
        destination: tuple[KVLayer, ...],
        *,
        mappings: Sequence[object] = (),
    ) -> None:
        """Copy from `source` into `destination`.

        Args:
            name: of the carrier.
            source: this process's pool.
            destination: the mapped one.
            mappings: what the tensors of `destination` live as long as.
        """
        self._name = name
        self._source = source
        self._destination = destination
        self._mappings = tuple(mappings)
        self._indices = BlockIndices()

    def write(self, move: BlockMove) -> None:
        """Copy, or launch the copy on the current stream; see `Link.write`."""
        copy_blocks(move, self._source, self._destination, self._indices)

    def finish(self, timeout_s: float) -> None:
        """Wait for copies within a GPU; those into host memory are done. See `Link.finish`."""
        if not self._destination[0].k.is_cuda:
            return
        stream = torch.cuda.current_stream()
        start = time.monotonic()
        while not stream.query():
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                found = f"no end within {timeout_s:g} s"
                raise DiagnosticError(carrier_failed(self._name, found))
            time.sleep(0.0 if waited_s < _AWAKE_S else _POLL_S)

    def close(self) -> None:
        """Let go of the mapping."""
        self._destination = ()
        self._source = ()
        self._mappings = ()
