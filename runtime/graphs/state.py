"""Per-slot state of running requests on the device: what a round reads and writes in place.

The host fills a request's row when it starts to run rounds here and then only adds blocks: lengths
and newest tokens advance on the device, ahead of what the host has read. Every tensor is allocated
once, so captured graphs may keep their addresses.

Legend: S slots, the last one for padding; T blocks of the longest request; B requests of a round;
W = G + 1 rows of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import RoundRequests


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundShape:
    """The numbers that fix every shape and grid of a round.

    Args:
        batch: requests, padding included.
        num_drafts: drafts of each request, 0 for target-only decoding.
        context: bound of every position + 1.
    """

    batch: int
    num_drafts: int
    context: int

    @property
    def width(self) -> int:
        """Rows of each request."""
        return self.num_drafts + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRow:
    """A request as the host knows it when it starts to run rounds on the device.

    Args:
        length: positions whose KV is final.
        newest_id_target: the token at that position.
        blocks: its block table.
    """

    slot: int
    length: int
    newest_id_target: int
    blocks: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundConstants:
    """Tensors that depend on a shape alone.

    Args:
        offsets_W: int64, 0..W - 1.
        row_request_BW: int32, b in row b.
        first_rows_B: int64, row of each request's newest token.
    """

    offsets_W: torch.Tensor
    row_request_BW: torch.Tensor
    first_rows_B: torch.Tensor


class RoundState:
    """Device tensors of all slots, inputs of the next round and its output.

    Attributes:
        padding_slot: the last slot; no request ever has it, its length stays 0.
        lengths_S: int64, positions whose KV is final.
        newest_ids_target_S: int64, the token after them.
        block_tables_ST: int32, 0 (the padding block) beyond a request's blocks.
        slots_B: int64 input, slots of the round's requests, then `padding_slot`.
        num_drafts_B: int64 input, drafts that count, 0 for padding.
        output_BX: int64 [B, 1 + W] output: accepted drafts, then the target's choice at each row.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_batch: int,
        max_drafts: int,
        max_length: int,
        kv_block_size: int,
        device: torch.device,
    ) -> None:
        """Allocate everything; every request of the next round is padding.

        Args:
            num_slots: requests that may run at once.
            max_batch: requests of the largest round.
            max_drafts: drafts of a request at most.
            max_length: tokens of a request at most.
            kv_block_size: tokens of a KV block.
            device: of the models.
        """
        num_blocks = -(-max_length // kv_block_size)
        self.padding_slot = num_slots
        self.kv_block_size = kv_block_size
        self.max_length = max_length
        self.device = device
        self.lengths_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.newest_ids_target_S = torch.zeros_like(self.lengths_S)
        self.block_tables_ST = torch.zeros(
            (num_slots + 1, num_blocks), dtype=torch.int32, device=device
        )
        self.slots_B = torch.full((max_batch,), num_slots, dtype=torch.int64, device=device)
        self.num_drafts_B = torch.zeros_like(self.slots_B)
        self._constants: dict[tuple[int, int], RoundConstants] = {}
        self.output_BX = torch.zeros((max_batch, max_drafts + 2), dtype=torch.int64, device=device)

    def constants(self, shape: RoundShape) -> RoundConstants:
        """Return what a shape fixes; made once, when the shape first runs."""
        key = (shape.batch, shape.width)
        found = self._constants.get(key)
        if found is None:
            requests_B = torch.arange(shape.batch, device=self.device)
            found = self._constants[key] = RoundConstants(
                offsets_W=torch.arange(shape.width, device=self.device),
                row_request_BW=requests_B.to(torch.int32)[:, None].repeat(1, shape.width),
                first_rows_B=requests_B * shape.width,
            )
        return found

    def write_requests(self, rows: Sequence[SlotRow]) -> None:
        """Set slots to what the host knows.

        Sync: none.
        """
        width = self.block_tables_ST.shape[1]
        slots, lengths, newest = self._copied(
            [
                [row.slot for row in rows],
                [row.length for row in rows],
                [row.newest_id_target for row in rows],
            ]
        )
        tables = [[*row.blocks, *[0] * (width - len(row.blocks))] for row in rows]
        self.lengths_S.index_copy_(0, slots, lengths)
        self.newest_ids_target_S.index_copy_(0, slots, newest)
        self.block_tables_ST.index_copy_(0, slots, self._copied(tables, torch.int32))

    def write_blocks(self, cells: Sequence[tuple[int, int, int]]) -> None:
        """Add blocks to tables.

        Args:
            cells: (slot, index in its table, block).

        Sync: none.
        """
        width = self.block_tables_ST.shape[1]
        places, blocks = self._copied(
            [
                [slot * width + index for slot, index, _ in cells],
                [block for _, _, block in cells],
            ]
        )
        self.block_tables_ST.view(-1).index_copy_(0, places, blocks.to(torch.int32))

    def write_batch(self, slots: Sequence[int], num_drafts: Sequence[int]) -> None:
        """Choose the requests of the rounds to come; all others are padding.

        Sync: none.
        """
        num_padding = self.slots_B.shape[0] - len(slots)
        both = self._copied(
            [[*slots, *[self.padding_slot] * num_padding], [*num_drafts, *[0] * num_padding]]
        )
        self.slots_B.copy_(both[0])
        self.num_drafts_B.copy_(both[1])

    def requests(self, shape: RoundShape) -> RoundRequests:
        """Return the requests of a round as they stand on the device.

        Sync: none.
        """
        size, slots_B = self.kv_block_size, self.slots_B[: shape.batch]
        constants = self.constants(shape)
        lengths_B = self.lengths_S.index_select(0, slots_B)
        block_tables_BT = self.block_tables_ST[:, : -(-shape.context // size)].index_select(
            0, slots_B
        )
        positions_BW = lengths_B[:, None] + constants.offsets_W
        blocks_BW = block_tables_BT.gather(1, positions_BW // size)
        return RoundRequests(
            slots_B=slots_B,
            lengths_B=lengths_B,
            newest_ids_target_B=self.newest_ids_target_S.index_select(0, slots_B),
            num_drafts_B=self.num_drafts_B[: shape.batch],
            block_tables_BT=block_tables_BT,
            positions_BW=positions_BW,
            kv_slots_BW=blocks_BW * size + positions_BW % size,
            row_request_BW=constants.row_request_BW,
            max_length=shape.context,
        )

    def commit(
        self, requests: RoundRequests, chosen_BW: torch.Tensor, num_accepted_B: torch.Tensor
    ) -> None:
        """Advance the requests by what a round commits and write its output.

        Args:
            requests: as they stood before the round.
            chosen_BW: int64 target ids, the target's choice at each row.
            num_accepted_B: int64, accepted drafts; the choices up to that row are committed.

        Sync: none.
        """
        num_requests, width = chosen_BW.shape
        slots_B = requests.slots_B
        is_real_B = slots_B != self.padding_slot
        newest_B = chosen_BW.gather(1, num_accepted_B[:, None])[:, 0]
        lengths_B = requests.lengths_B + num_accepted_B + 1
        self.lengths_S.index_copy_(0, slots_B, lengths_B * is_real_B)
        self.newest_ids_target_S.index_copy_(0, slots_B, newest_B * is_real_B)
        self.output_BX[:num_requests, 0].copy_(num_accepted_B)
        self.output_BX[:num_requests, 1 : width + 1].copy_(chosen_BW)

    def _copied(
        self, values: Sequence[Sequence[int]], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """Return host numbers on the device; the copy is staged, nothing waits."""
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)
