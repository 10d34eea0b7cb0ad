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

from runtime.batch import (
    PackedLayout,
    RoundKind,
    RoundLaws,
    RoundRequests,
    RoundSampling,
    on_device,
)
from runtime.graphs.input_ring import InputRing
from runtime.graphs.slot_sampling import GREEDY, SamplingState, SlotSampling
from runtime.kernels.draw import of_rows
from runtime.kernels.round import RoundEnd, finish_round, prepare_round
from runtime.kernels.round_inputs import batch_put, block_put

_NUM_ARRIVALS = 1 << 16  # programs of one attention launch that share rows; more bring their own
_MIN_ENTRY_CELLS = 128  # one for every thread of the kernel that reads an entry


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundShape:
    """The numbers that fix every shape and grid of a round.

    Args:
        batch: requests, padding included.
        num_drafts: drafts of each request at most, 0 for target-only decoding.
        context: bound of every position + 1.
        num_packed_rows: rows of a ragged round, which packs each request's own drafts + 1;
            None: every request has `width` rows.
        kind: how tokens are chosen.
        is_split: whether the host masks ids between drafts and verification: a dense round in two
            halves, of requests that have a grammar.
    """

    batch: int
    num_drafts: int
    context: int
    num_packed_rows: int | None = None
    kind: RoundKind = "greedy"
    is_split: bool = False

    @property
    def width(self) -> int:
        """Rows of each request of a dense round."""
        return self.num_drafts + 1

    @property
    def num_rows(self) -> int:
        """Rows that the target verifies."""
        return self.num_packed_rows or self.batch * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRow:
    """A request as the host knows it when it starts to run rounds on the device.

    Args:
        length: positions whose KV is final.
        newest_id_target: the token at that position.
        blocks: its block table.
        sampling: how its tokens are chosen.
    """

    slot: int
    length: int
    newest_id_target: int
    blocks: Sequence[int]
    sampling: SlotSampling = GREEDY


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundConstants:
    """Tensors that depend on a shape alone.

    Args:
        row_request_BW: int32, b in row b.
        row_request_B: int32, 0..B - 1.
        first_rows_B: int64, row of each request's newest token in a dense round.
        rows_N: int64, 0..N - 1, of a ragged round.
    """

    row_request_BW: torch.Tensor
    row_request_B: torch.Tensor
    first_rows_B: torch.Tensor
    rows_N: torch.Tensor


class RoundState:
    """Device tensors of all slots, inputs of the next round and its output.

    Attributes:
        padding_slot: the last slot; no request ever has it, its length stays 0.
        lengths_S: int64, positions whose KV is final.
        newest_ids_target_S: int64, the token after them.
        block_tables_ST: int32, 0 (the padding block) beyond a request's blocks.
        slots_B: int64 input, slots of the round's requests, then `padding_slot`, at least once.
        num_drafts_B: int64 input, drafts that count, 0 for padding.
        output_BX: int64 [B, 1 + W] output: accepted drafts, then the target's choice at each row.
        sampling: how the requests in slots choose tokens.
        num_counted_B: int64 output, drafts that counted, of a draft that may have fewer than asked.
        confidence_BG: float32 output, the draft's chances for a round's drafts; 1 without a head.
        arrivals_X: int32 zeros, see `PreparedBatch`.
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
        self.slots_B = torch.full((max_batch + 1,), num_slots, dtype=torch.int64, device=device)
        self.num_drafts_B = torch.zeros_like(self.slots_B)
        self.arrivals_X = torch.zeros(_NUM_ARRIVALS, dtype=torch.int32, device=device)
        self._written_batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._constants: dict[tuple[int, int, int], RoundConstants] = {}
        self.output_BX = torch.zeros((max_batch, max_drafts + 2), dtype=torch.int64, device=device)
        self.num_counted_B = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.sampling = SamplingState(num_slots + 1, device)
        self.confidence_BG = torch.ones((max_batch, max_drafts), device=device)
        self._ring = InputRing(capacity=max(_MIN_ENTRY_CELLS, max_batch + 1), device=device)
        self._put_blocks = block_put(self.block_tables_ST, self._ring.example)
        self._put_batch = batch_put(
            self.slots_B, self.num_drafts_B, self._ring.example, padding_slot=num_slots
        )

    def constants(self, shape: RoundShape) -> RoundConstants:
        """Return what a shape fixes; made once, when the shape first runs."""
        key = (shape.batch, shape.width, shape.num_rows)
        found = self._constants.get(key)
        if found is None:
            requests_B = torch.arange(shape.batch, device=self.device)
            found = self._constants[key] = RoundConstants(
                row_request_BW=requests_B.to(torch.int32)[:, None].repeat(1, shape.width),
                row_request_B=requests_B.to(torch.int32),
                first_rows_B=requests_B * shape.width,
                rows_N=torch.arange(shape.num_rows, device=self.device),
            )
        return found

    def write_requests(self, rows: Sequence[SlotRow]) -> None:
        """Set slots to what the host knows.

        Sync: none.
        """
        width = self.block_tables_ST.shape[1]
        slots = self.write_newest([(row.slot, row.length, row.newest_id_target) for row in rows])
        # Filled in place: lists of whole tables cost a millisecond where contexts are long.
        tables = torch.zeros((len(rows), width), dtype=torch.int32)
        host = tables.numpy()
        for place, row in enumerate(rows):
            host[place, : len(row.blocks)] = row.blocks
        self.block_tables_ST.index_copy_(0, slots, tables.to(self.device, non_blocking=True))
        self.sampling.write([row.slot for row in rows], [row.sampling for row in rows])

    def write_newest(self, rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Set where requests stand; returns int64, their slots.

        Args:
            rows: (slot, positions whose KV is final, the token after them).

        Sync: none.
        """
        columns = on_device([*zip(*rows, strict=True)], device=self.device)
        slots, lengths, newest = columns.unbind()
        self.lengths_S.index_copy_(0, slots, lengths)
        self.newest_ids_target_S.index_copy_(0, slots, newest)
        return slots

    def write_blocks(self, cells: Sequence[tuple[int, int, int]]) -> None:
        """Add blocks to tables.

        Args:
            cells: (slot, index in its table, block), each place once.

        Sync: none, see `InputRing`.
        """
        width, most = self.block_tables_ST.shape[1], self._ring.capacity
        places = [slot * width + index for slot, index, _ in cells]
        blocks = [block for _, _, block in cells]
        for start in range(0, len(cells), most):
            part = slice(start, start + most)
            self._ring.launch(self._put_blocks, places[part], blocks[part])

    def write_batch(self, slots: Sequence[int], num_drafts: Sequence[int]) -> None:
        """Choose the requests of the rounds to come; all others are padding.

        The same ones as before cost nothing.

        Sync: none, see `InputRing`.
        """
        batch = (tuple(slots), tuple(num_drafts))
        if batch != self._written_batch:
            self._written_batch = batch
            self._ring.launch(self._put_batch, *batch)

    def requests(self, shape: RoundShape) -> RoundRequests:
        """Return the requests of a round as they stand on the device.

        Sync: none.
        """
        return self.requests_in(shape, self.slots_B, self.num_drafts_B)

    def requests_in(
        self, shape: RoundShape, slots_B: torch.Tensor, num_drafts_B: torch.Tensor
    ) -> RoundRequests:
        """Return the requests of a round that has inputs of its own; see `requests`.

        Args:
            shape: dense, unless the inputs are this state's.
            slots_B: int64, of the requests and padding.
            num_drafts_B: int64, drafts that count.

        Sync: none.
        """
        constants = self.constants(shape)
        is_packed = shape.num_packed_rows is not None
        # A packed round has padding rows, which are those of one more request.
        rows = prepare_round(
            slots_B[: shape.batch + is_packed],
            self.lengths_S,
            self.newest_ids_target_S,
            self.block_tables_ST,
            num_blocks=-(-shape.context // self.kv_block_size),
            width=shape.width,
            kv_block_size=self.kv_block_size,
        )
        count = shape.batch
        return RoundRequests(
            slots_B=slots_B[:count],
            lengths_B=rows.lengths_B[:count],
            newest_ids_target_B=rows.newest_ids_target_B[:count],
            num_drafts_B=num_drafts_B[:count],
            block_tables_BT=rows.block_tables_BT,
            positions_BW=rows.positions_BW[:count],
            kv_slots_BW=rows.kv_slots_BW[:count],
            positions_WB=rows.positions_WB[:, :count],
            kv_slots_WB=rows.kv_slots_WB[:, :count],
            ids_target_BW=rows.ids_target_BW[:count],
            row_request_BW=constants.row_request_BW,
            row_request_B=constants.row_request_B,
            max_length=shape.context,
            layout=self._layout(shape) if is_packed else None,
            sampling=self._sampling(shape, slots_B[:count]),
            arrivals_X=self.arrivals_X,
            laws=RoundLaws() if shape.kind == "rejection" else None,
        )

    def _sampling(self, shape: RoundShape, slots_B: torch.Tensor) -> RoundSampling | None:
        """Return how the requests in slots choose; None where all are greedy.

        Laws are made by library operations, draft by draft: they read columns by request.

        Sync: none.
        """
        if shape.kind == "greedy":
            return None
        has_filters = shape.kind in ("filtered", "rejection")
        sampling = self.sampling.select(slots_B, has_filters=has_filters)
        return of_rows(sampling, None) if shape.kind == "rejection" else sampling

    def _layout(self, shape: RoundShape) -> PackedLayout:
        """Pack each request's own rows one after the other.

        Sync: none.
        """
        constants = self.constants(shape)
        rows_N, last = constants.rows_N, shape.num_rows - 1
        is_real_B = self.slots_B[: shape.batch] != self.padding_slot
        counts_B = (self.num_drafts_B[: shape.batch] + 1) * is_real_B
        ends_B = counts_B.cumsum(0)
        first_rows_B = ends_B - counts_B
        request_N = torch.searchsorted(ends_B, rows_N, right=True)
        is_padding_N = request_N == shape.batch
        held_N = request_N.clamp(max=shape.batch - 1)
        cells_N = held_N * shape.width + rows_N - first_rows_B[held_N]
        offsets_W = torch.arange(shape.width, device=self.device)
        return PackedLayout(
            first_rows_B=first_rows_B.clamp(max=last),
            cells_N=cells_N.masked_fill(is_padding_N, 0),
            request_N=request_N.to(torch.int32),
            is_padding_N=is_padding_N,
            rows_BW=(first_rows_B[:, None] + offsets_W).clamp(max=last),
        )

    def finish(
        self,
        shape: RoundShape,
        requests: RoundRequests,
        chosen_BW: torch.Tensor,
        num_drafts_B: torch.Tensor,
    ) -> RoundEnd:
        """Accept drafts, advance the requests by what the round commits, and write its output.

        Args:
            shape: of the round.
            requests: as they stood before the round, their drafts written.
            chosen_BW: int64 target ids, the target's choice at each row.
            num_drafts_B: int64, drafts that may be accepted.

        Sync: none.
        """
        layout = requests.layout
        return finish_round(
            requests.slots_B,
            requests.lengths_B,
            requests.drafts_BG,
            chosen_BW,
            num_drafts_B,
            self.constants(shape).first_rows_B if layout is None else layout.first_rows_B,
            num_rows=shape.num_rows,
            lengths_S=self.lengths_S,
            newest_ids_target_S=self.newest_ids_target_S,
            output_BX=self.output_BX,
        )
