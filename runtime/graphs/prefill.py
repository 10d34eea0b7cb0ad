"""The prompt of one request as rows of a fixed number: what a captured prefill reads and leaves.

The rows that are left of a prompt are padded to a bucket. Padding rows repeat the last real one
(same token, same position), belong to a request of their own whose blocks are all block 0, and
write there; nobody reads what they yield. How many rows are real is a number on the device, so one
graph serves every prompt that fits. Every tensor is allocated once: graphs keep their addresses.

Legend: N rows of a bucket, T blocks of the longest request, B = 1 request, U row tiles,
X numbers that the host hands in: slot, first position, real rows, T blocks, N token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import ROW_TILE_ROWS, PreparedBatch
from runtime.graphs.state import RoundState
from runtime.kernels.prefill_rows import NUM_SCALARS, place_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """The numbers that fix every shape and grid of a captured prefill.

    Args:
        num_rows: rows, padding included.
        context: bound of every position + 1.
    """

    num_rows: int
    context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillInput:
    """Rows of one request, the last of which yields its next token.

    Args:
        slot: of the request.
        start: absolute position of the first row.
        ids_target: target ids of the rows, one or more.
        blocks: its block table.
    """

    slot: int
    start: int
    ids_target: Sequence[int]
    blocks: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefillRows:
    """The rows of a prefill on the device.

    Args:
        batch: all of them, padding behind the real ones.
        slots_B: int64, the request's slot.
        last_rows_B: int64, the last real row.
        known_next_ids_N: int64 target ids, the token after each row; not known of the last real
            row, any of padding.
    """

    batch: PreparedBatch
    slots_B: torch.Tensor
    last_rows_B: torch.Tensor
    known_next_ids_N: torch.Tensor

    def next_ids(self, chosen_B: torch.Tensor) -> torch.Tensor:
        """Return int64 [N], the token after each row, `chosen_B` after the last real one.

        They are written where the known ones are.
        """
        return self.known_next_ids_N.index_copy_(0, self.last_rows_B, chosen_B)


class PrefillState:
    """Device tensors of the request that is prefilled.

    Attributes:
        shapes: that are captured, the largest first.
        inputs_X: int64 input.
        output_B: int64 output, the token that the prompt yields.
    """

    def __init__(
        self, state: RoundState, *, row_counts: Sequence[int], contexts: Sequence[int]
    ) -> None:
        """Allocate everything; the next prefill is one row of padding.

        Args:
            state: of all slots.
            row_counts: buckets, one or more.
            contexts: bounds of positions that have shapes of their own.
        """
        most, device = max(row_counts), state.device
        self.shapes = tuple(
            PrefillShape(num_rows=num_rows, context=context)
            for num_rows in sorted(set(row_counts), reverse=True)
            for context in sorted(set(contexts), reverse=True)
        )
        self._state = state
        self._num_blocks = state.block_tables_ST.shape[1]
        self.inputs_X = torch.zeros(
            NUM_SCALARS + self._num_blocks + most, dtype=torch.int64, device=device
        )
        self.output_B = torch.zeros(1, dtype=torch.int64, device=device)
        self._tiles = {
            num_rows: torch.tensor(_tiles(num_rows), dtype=torch.int32, device=device)
            for num_rows in row_counts
        }
        self.write_padding(1)

    def write_padding(self, num_rows: int) -> None:
        """Choose a prefill of the padding slot: it alters nothing real.

        Sync: none.
        """
        ids = (0,) * num_rows
        padding = PrefillInput(slot=self._state.padding_slot, start=0, ids_target=ids, blocks=())
        self.write(padding)

    def write(self, given: PrefillInput) -> None:
        """Choose what the next prefill computes.

        Sync: none.
        """
        table = [*given.blocks, *[0] * (self._num_blocks - len(given.blocks))]
        values = [given.slot, given.start, len(given.ids_target), *table, *given.ids_target]
        self.inputs_X[: len(values)].copy_(torch.tensor(values), non_blocking=True)

    def rows(self, shape: PrefillShape) -> PrefillRows:
        """Return the rows of the prefill that was written.

        Sync: none.
        """
        size = self._state.kv_block_size
        placed = place_prompt(
            self.inputs_X,
            num_rows=shape.num_rows,
            num_blocks=-(-shape.context // size),
            first_id=NUM_SCALARS + self._num_blocks,
            kv_block_size=size,
        )
        batch = PreparedBatch(
            ids_target_N=placed.ids_target_N,
            positions_N=placed.positions_N,
            slots_N=placed.kv_slots_N,
            row_request_N=placed.row_request_N,
            block_tables_BT=placed.block_tables_2T,
            max_length=shape.context,
            tiles_U2=self._tiles[shape.num_rows],
            arrivals_X=self._state.arrivals_X,
        )
        return PrefillRows(
            batch=batch,
            slots_B=self.inputs_X[:1],
            last_rows_B=placed.last_row_1,
            known_next_ids_N=placed.next_ids_target_N,
        )


def _tiles(num_rows: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of groups; real rows lead, so one request names a group.

    Padding rows in the group of real ones see no key that those do not see.
    """
    return [(row, min(ROW_TILE_ROWS, num_rows - row)) for row in range(0, num_rows, ROW_TILE_ROWS)]
