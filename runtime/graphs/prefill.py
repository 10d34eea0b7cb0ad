"""Prompts as rows of a fixed number: what a captured prefill reads and leaves.

Prompts lie one after the other, each from a group of rows on: the rows of a group share attention
programs and are one request's. What is left of a group and of a bucket is padding: rows of a
request of its own whose blocks are all block 0, which write there; nobody reads what they yield. A
place without a prompt is the padding slot's. How many rows are real is a number on the device, so
one graph serves every number of prompts that fit. Every tensor is allocated once: graphs keep
their addresses.

Legend: N rows of a bucket, R places for prompts, T blocks of the longest request, U groups of
rows, X numbers that the host hands in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.batch import ROW_TILE_ROWS, PreparedBatch, RoundKind
from runtime.graphs.marks import new_mark
from runtime.graphs.slot_sampling import GREEDY, SlotSampling
from runtime.graphs.state import RoundState
from runtime.kernels.prefill_rows import NUM_SCALARS, PromptRoom, place_prompts

MOST_PLACES = 32
"""Prompts of a captured prefill at most: each costs a row of the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShape:
    """The numbers that fix every shape and grid of a captured prefill.

    Args:
        num_rows: rows, padding included.
        context: bound of every position + 1.
        num_places: prompts at most.
        kind: how the prompts' next tokens are chosen, which none of "rejection" is: nothing was
            drafted for them.
    """

    num_rows: int
    context: int
    num_places: int = 1
    kind: RoundKind = "greedy"

    def num_fitting(self, num_rows: Sequence[int], ends: Sequence[int]) -> int:
        """Return how many of the first prompts fit.

        Args:
            num_rows: of each prompt.
            ends: its last position + 1.
        """
        count = 0
        for first, rows, end in zip(first_rows(num_rows), num_rows, ends, strict=True):
            has_room = first + rows <= self.num_rows and end <= self.context
            if count == self.num_places or not has_room:
                break
            count += 1
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillInput:
    """Rows of one request, the last of which yields its next token.

    Args:
        slot: of the request.
        start: absolute position of the first row.
        ids_target: target ids of the rows, one or more.
        blocks: its block table.
        sampling: how its next token is chosen.
    """

    slot: int
    start: int
    ids_target: Sequence[int]
    blocks: Sequence[int]
    sampling: SlotSampling = GREEDY


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefillRows:
    """The rows of a prefill on the device.

    Args:
        batch: all of them, padding included.
        slots_R: int64, the slots of the prompts.
        last_rows_R: int64, the last real row of each.
        known_next_ids_N: int64 target ids, the token after each row; not known of the last real
            rows, any of padding.
    """

    batch: PreparedBatch
    slots_R: torch.Tensor
    last_rows_R: torch.Tensor
    known_next_ids_N: torch.Tensor

    def next_ids(self, chosen_R: torch.Tensor) -> torch.Tensor:
        """Return int64 [N], the token after each row, `chosen_R` after the last real ones.

        They are written where the known ones are.
        """
        return self.known_next_ids_N.index_copy_(0, self.last_rows_R, chosen_R)


class PrefillState:
    """Device tensors of the prompts that are prefilled.

    Attributes:
        shapes: that are captured, the largest first.
        inputs_X: int64 input.
        output_R: int64 output, the token that each prompt yields.
    """

    def __init__(
        self,
        state: RoundState,
        *,
        row_counts: Sequence[int],
        contexts: Sequence[int],
        max_num_prompts: int,
        kinds: Sequence[RoundKind] = ("greedy",),
    ) -> None:
        """Allocate everything; what the next prefill reads is to be written first.

        Args:
            state: of all slots.
            row_counts: buckets, one or more.
            contexts: bounds of positions that have shapes of their own; only greedy ones have
                more than the largest.
            max_num_prompts: of a prefill.
            kinds: ways to choose the next tokens.
        """
        most, device = min(max_num_prompts, MOST_PLACES), state.device
        largest = (max(contexts),)
        self.shapes = tuple(
            PrefillShape(
                num_rows=num_rows,
                context=context,
                num_places=max(1, min(most, num_rows // ROW_TILE_ROWS)),
                kind=kind,
            )
            for num_rows in sorted(set(row_counts), reverse=True)
            for kind in kinds
            for context in (sorted(set(contexts), reverse=True) if kind == "greedy" else largest)
        )
        self._state = state
        rooms = [self._room(shape) for shape in self.shapes]
        self.inputs_X = torch.zeros(
            max(room.num_inputs for room in rooms), dtype=torch.int64, device=device
        )
        # Pinned memory: a large copy from elsewhere would wait for the rounds in flight.
        self._numbers_X = torch.zeros(
            self.inputs_X.shape, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._mark = new_mark(device)
        self.output_R = torch.zeros(
            max(room.num_places for room in rooms), dtype=torch.int64, device=device
        )
        self._tiles = {
            num_rows: torch.tensor(_tiles(num_rows), dtype=torch.int32, device=device)
            for num_rows in row_counts
        }

    def write_padding(self, shape: PrefillShape) -> None:
        """Choose a prefill of the padding slot, as full as can be: it alters nothing real.

        Sync: none.
        """
        size = min(shape.num_rows // shape.num_places, shape.context)
        if shape.num_places > 1:  # whole groups: rows between prompts would not fit besides
            size = size // ROW_TILE_ROWS * ROW_TILE_ROWS or size
        padding = PrefillInput(
            slot=self._state.padding_slot, start=0, ids_target=(0,) * size, blocks=()
        )
        self.write(shape, [padding] * shape.num_places)

    def write(self, shape: PrefillShape, prompts: Sequence[PrefillInput]) -> None:
        """Choose what the next prefill computes, which is of this shape.

        Args:
            shape: holds the prompts, see `PrefillShape.num_fitting`.
            prompts: one or more.

        Sync: waits for the copy of the last prefill's numbers, which is through once it was read.
        """
        room = self._room(shape)
        num_places = room.num_places
        assert len(prompts) <= num_places, "a prefill has a place for each prompt"
        self._mark.synchronize()  # the copy before this one; its prefill was read since
        # Filled in place: a list of all numbers costs milliseconds where contexts are long.
        numbers = self._numbers_X[: room.num_inputs].zero_()
        host_X = numbers.numpy()
        scalars = host_X[: NUM_SCALARS * num_places].reshape(NUM_SCALARS, num_places)
        tables_RT = host_X[scalars.size : room.first_id].reshape(num_places, room.num_blocks)
        scalars[:, len(prompts) :] = [[self._state.padding_slot], [0], [0], [shape.num_rows]]
        end = room.first_id
        counts = [len(prompt.ids_target) for prompt in prompts]
        for place, (prompt, first) in enumerate(zip(prompts, first_rows(counts), strict=True)):
            row = room.first_id + first
            end = row + counts[place]
            assert end <= room.num_inputs, "a prefill has rows for all prompts"
            scalars[:, place] = prompt.slot, prompt.start, counts[place], first
            blocks = prompt.blocks[: room.num_blocks]
            tables_RT[place, : len(blocks)] = blocks
            host_X[row:end] = prompt.ids_target
        self.inputs_X[:end].copy_(numbers[:end], non_blocking=True)
        self._mark.record()
        if shape.kind != "greedy":
            self._state.sampling.write(
                [prompt.slot for prompt in prompts], [prompt.sampling for prompt in prompts]
            )

    def rows(self, shape: PrefillShape) -> PrefillRows:
        """Return the rows of the prefill that was written.

        Sync: none.
        """
        placed = place_prompts(self.inputs_X, self._room(shape), group_rows=ROW_TILE_ROWS)
        batch = PreparedBatch(
            ids_target_N=placed.ids_target_N,
            positions_N=placed.positions_N,
            slots_N=placed.kv_slots_N,
            row_request_N=placed.row_request_N,
            block_tables_BT=placed.block_tables_QT,
            max_length=shape.context,
            tiles_U2=self._tiles[shape.num_rows],
            arrivals_X=self._state.arrivals_X,
        )
        return PrefillRows(
            batch=batch,
            slots_R=self.inputs_X[: shape.num_places],
            last_rows_R=placed.last_rows_R,
            known_next_ids_N=placed.next_ids_target_N,
        )

    def _room(self, shape: PrefillShape) -> PromptRoom:
        size = self._state.kv_block_size
        return PromptRoom(
            num_rows=shape.num_rows,
            num_places=shape.num_places,
            num_blocks=-(-shape.context // size),
            kv_block_size=size,
        )


def group_end(row: int) -> int:
    """Return the first row of a group at or behind `row`."""
    return -(-row // ROW_TILE_ROWS) * ROW_TILE_ROWS


def first_rows(num_rows: Iterable[int]) -> Iterator[int]:
    """Yield where each prompt lies in a prefill: from the group behind the one before it on.

    Args:
        num_rows: of each prompt, in order.
    """
    row = 0
    for count in num_rows:
        yield row
        row = group_end(row + count)


def _tiles(num_rows: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of groups; real rows lead, so one request names a group.

    Padding rows in the group of real ones see no key that those do not see.
    """
    return [(row, min(ROW_TILE_ROWS, num_rows - row)) for row in range(0, num_rows, ROW_TILE_ROWS)]
