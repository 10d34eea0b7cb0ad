"""How KV gets from one process's pool into another's: one interface, several carriers.

The decode side describes its memory once (`Receiver.address`); the prefill side connects to that
description and writes. Writes are one-sided: the receiver learns of them from the control
connection, never from the carrier. `Link.finish` returns when everything written so far is in the
receiver's memory.

Legend: a *pool layer* is one layer of a side's own pool, counted within that pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.kv import KVLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMove:
    """Heads of some blocks of one layer, keys and values alike.

    Args:
        source_layer: pool layer of the sender.
        destination_layer: pool layer of the receiver.
        source_head: first head in the sender's layer.
        destination_head: first head in the receiver's layer.
        num_heads: consecutive heads.
        source_blocks: blocks in the sender's pool.
        destination_blocks: as many blocks in the receiver's pool, in the same order.
    """

    source_layer: int
    destination_layer: int
    source_head: int
    destination_head: int
    num_heads: int
    source_blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]

    def num_bytes(self, layer: KVLayer) -> int:
        """Return the bytes that travel: keys and values of `num_heads` heads of every block."""
        _, _, kv_block_size, head_dim = layer.k.shape
        per_block = 2 * self.num_heads * kv_block_size * head_dim * layer.k.dtype.itemsize
        return per_block * len(self.source_blocks)


class Receiver(Protocol):
    """Memory that others write into."""

    @property
    def address(self) -> bytes:
        """What a sender needs to reach this memory."""

    def close(self) -> None:
        """Take the memory back; links to it are useless afterwards."""


class Link(Protocol):
    """A sender's way into one receiver."""

    @property
    def is_ordered(self) -> bool:
        """Whether what the receiver launches comes behind what the sender's own thread launches.

        So both are on one stream of one device. Writes and `finish` then wait for nothing: they are
        launched, and the streams keep the order.
        """

    def write(self, move: BlockMove) -> None:
        """Start to copy; the source must stay as it is until `finish`.

        Raises:
            DiagnosticError: SD863, the carrier failed.
        """

    def finish(self, timeout_s: float) -> None:
        """Wait until all writes are in the receiver's memory; an ordered link need not wait.

        Raises:
            DiagnosticError: SD863, the carrier failed or took longer.
        """

    def close(self) -> None:
        """Let go of the receiver; nothing is written afterwards."""


class Transport(Protocol):
    """A carrier, on either side."""

    @property
    def name(self) -> str:
        """`memory`, `shared`, `nixl`, `mooncake`."""

    @property
    def linger_s(self) -> float:
        """How long a write that was started may still arrive when its sender is cut off."""

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros for a pool that is to be offered: memory that this carrier reaches."""

    def receive_into(self, layers: Sequence[KVLayer]) -> Receiver:
        """Offer a pool, made of tensors of `allocate`, to senders."""

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> Link:
        """Return a way from a pool of this process to a receiver.

        Args:
            address: of the receiver.
            layers: the sender's own pool.

        Raises:
            DiagnosticError: SD863, the address means nothing here.
        """
