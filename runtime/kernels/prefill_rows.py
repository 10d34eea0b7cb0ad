"""The rows of prompts of fixed room on the device: padded, placed, with the id after each.

A prompt starts where its place says; the rows behind it, up to the next prompt, are padding.
Integers only, so that kernel and twin agree exactly.

Legend: N rows, R places for prompts, T blocks of a table, X numbers that the host hands in: slots,
first positions, numbers of rows and first rows [R each], block tables [R, T], ids of the rows [N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_SCALARS = 4
"""Numbers of each place before the tables in what the host hands in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRoom:
    """The numbers that fix how prompts are laid out.

    Args:
        num_rows: N.
        num_places: R, one or more; one without a prompt has no rows and starts at row N.
        num_blocks: T; positions of real rows lie in them.
        kv_block_size: tokens of a block.
    """

    num_rows: int
    num_places: int
    num_blocks: int
    kv_block_size: int

    @property
    def first_id(self) -> int:
        """Where ids begin in what the host hands in."""
        return self.num_places * (NUM_SCALARS + self.num_blocks)

    @property
    def num_inputs(self) -> int:
        """How many numbers the host hands in."""
        return self.first_id + self.num_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRows:
    """Rows of prompts and padding.

    Padding between prompts repeats the last row of the one before it, so that it may share a group
    of rows with it; the rest is at position 0.

    Args:
        ids_target_N: int64.
        positions_N: int64.
        kv_slots_N: int64, 0 of padding.
        row_request_N: int32, the place, R of padding.
        block_tables_QT: int32, those of the places, then zeros: Q = R + 1.
        next_ids_target_N: int64, the id after a row; of last rows and of padding, any.
        last_rows_R: int64, the last row of each prompt; N - 1 where there is none.
    """

    ids_target_N: torch.Tensor
    positions_N: torch.Tensor
    kv_slots_N: torch.Tensor
    row_request_N: torch.Tensor
    block_tables_QT: torch.Tensor
    next_ids_target_N: torch.Tensor
    last_rows_R: torch.Tensor


def place_prompts(inputs_X: torch.Tensor, room: PromptRoom, *, group_rows: int) -> PromptRows:
    """Lay prompts out.

    Args:
        inputs_X: int64, contiguous, at least `room.num_inputs`; prompts start in ascending rows,
            the first one at row 0, places without a prompt come last.
        room: for them.
        group_rows: rows that share an attention program; prompts start at multiples of it.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    if inputs_X.is_cuda:
        from runtime.kernels.cuda.prefill_rows import launch_place_prompts as place
    else:
        place = place_prompts_twin
    return place(inputs_X, room, group_rows=group_rows)


def place_prompts_twin(inputs_X: torch.Tensor, room: PromptRoom, *, group_rows: int) -> PromptRows:
    """Compute `place_prompts` with torch."""
    num_places, num_blocks = room.num_places, room.num_blocks
    scalars = inputs_X[: num_places * NUM_SCALARS].view(NUM_SCALARS, num_places)
    _, starts_R, counts_R, firsts_R = scalars.unbind()
    tables_RT = inputs_X[num_places * NUM_SCALARS : room.first_id].view(num_places, num_blocks)
    ids_N = inputs_X[room.first_id : room.num_inputs]
    rows_N = torch.arange(room.num_rows, device=inputs_X.device)
    place_N = (firsts_R <= rows_N[:, None]).sum(dim=1) - 1
    offsets_N = rows_N - firsts_R[place_N]
    last_N = counts_R[place_N] - 1
    is_padding_N = offsets_N > last_N
    is_far_N = offsets_N >= (last_N // group_rows + 1) * group_rows
    own_N = torch.minimum(offsets_N, last_N)
    positions_N = (starts_R[place_N] + own_N).masked_fill(is_far_N, 0)
    blocks_N = tables_RT[place_N, positions_N // room.kv_block_size]
    slots_N = blocks_N * room.kv_block_size + positions_N % room.kv_block_size
    following_N = firsts_R[place_N] + torch.minimum(offsets_N + 1, last_N)
    last_rows_R = (firsts_R + counts_R - 1).clamp(max=room.num_rows - 1)
    return PromptRows(
        ids_target_N=ids_N[firsts_R[place_N] + own_N],
        positions_N=positions_N,
        kv_slots_N=slots_N.masked_fill(is_padding_N, 0),
        row_request_N=place_N.masked_fill(is_padding_N, num_places).to(torch.int32),
        block_tables_QT=torch.cat((tables_RT, torch.zeros_like(tables_RT[:1]))).to(torch.int32),
        next_ids_target_N=ids_N[following_N],
        last_rows_R=last_rows_R,
    )
