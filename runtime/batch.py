"""Frozen inputs of a forward pass, shared by models, proposers and the engine.

Legend: N packed rows, B requests, T blocks in the longest block table. A row is one token of one
request at one absolute position; prefill, decode and verify rows may share a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """Everything one forward reads besides weights and the KV pool.

    Args:
        ids_target_N: int64, target vocabulary.
        positions_N: int64, absolute position of the row in its request.
        slots_N: int64, flat KV slot (block * kv_block_size + offset) that the row writes.
        row_request_N: int32, row -> row of `block_tables_BT`.
        block_tables_BT: int32, block ids of each request in order; unused entries are 0.
        max_length: largest position + 1 that a row sees, over all rows (host value, sizes grids
            only).
        limits_N: int64, last position that a row attends to; None: its own. Rows of a block draft
            see the whole block.
        window_positions_N: int64, position that a sliding window of the row ends at; None: its own.
            Windows of a block draft end at the anchor for all rows of the block.

    Invariants: a row attends to positions 0..its limit; rows of one request are in ascending order;
    all rows of a layer are written to the pool before that layer's attention reads it.
    """

    ids_target_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    row_request_N: torch.Tensor
    block_tables_BT: torch.Tensor
    max_length: int
    limits_N: torch.Tensor | None = None
    window_positions_N: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return self.ids_target_N.shape[0]
