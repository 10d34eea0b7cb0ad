"""Copies between two pools whose tensors one process can address."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer


def copy_blocks(move: BlockMove, source: Sequence[KVLayer], destination: Sequence[KVLayer]) -> None:
    """Copy what a move names; asynchronous on CUDA, in the current stream.

    Args:
        move: which heads of which blocks.
        source: the sender's pool.
        destination: the receiver's pool.
    """
    heads_in = slice(move.source_head, move.source_head + move.num_heads)
    heads_out = slice(move.destination_head, move.destination_head + move.num_heads)
    origin, goal = source[move.source_layer], destination[move.destination_layer]
    blocks_in = torch.tensor(move.source_blocks, device=origin.k.device)
    blocks_out = torch.tensor(move.destination_blocks, device=goal.k.device)
    for read, written in ((origin.k, goal.k), (origin.v, goal.v)):
        written[blocks_out, heads_out] = read[blocks_in, heads_in].to(written.device)
