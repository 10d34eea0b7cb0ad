"""The rows of a prompt of fixed room on the device: padded, placed, with the id after each.

Integers only, so that kernel and twin agree exactly.

Legend: N rows, T blocks of a table, X numbers that the host hands in: slot, first position, real
rows, all blocks of the longest request, ids of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_SCALARS = 3
"""Numbers before the table in what the host hands in."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRows:
    """Rows of one request, then padding that repeats the last real one.

    Args:
        ids_target_N: int64.
        positions_N: int64.
        kv_slots_N: int64, 0 of padding.
        row_request_N: int32, 0, or 1 of padding.
        block_tables_2T: int32, the request's, then zeros.
        next_ids_target_N: int64, the id after a row; of the last real row and of padding, any.
        last_row_1: int64, the last real row.
    """

    ids_target_N: torch.Tensor
    positions_N: torch.Tensor
    kv_slots_N: torch.Tensor
    row_request_N: torch.Tensor
    block_tables_2T: torch.Tensor
    next_ids_target_N: torch.Tensor
    last_row_1: torch.Tensor


def place_prompt(
    inputs_X: torch.Tensor, *, num_rows: int, num_blocks: int, first_id: int, kv_block_size: int
) -> PromptRows:
    """Lay a prompt out.

    Args:
        inputs_X: int64, contiguous.
        num_rows: N, at least the real rows.
        num_blocks: T; positions of real rows lie in them.
        first_id: index of the first id.
        kv_block_size: tokens of a block.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    if inputs_X.is_cuda:
        from runtime.kernels.cuda.prefill_rows import launch_place_prompt as place
    else:
        place = place_prompt_twin
    return place(
        inputs_X, num_rows=num_rows, num_blocks=num_blocks, first_id=first_id,
        kv_block_size=kv_block_size,
    )  # fmt: skip


def place_prompt_twin(
    inputs_X: torch.Tensor, *, num_rows: int, num_blocks: int, first_id: int, kv_block_size: int
) -> PromptRows:
    """Compute `place_prompt` with torch."""
    rows_N = torch.arange(num_rows, device=inputs_X.device)
    start_1, last_row_1 = inputs_X[1:2], inputs_X[2:3] - 1
    ids_N = inputs_X[first_id : first_id + num_rows]
    table_T = inputs_X[NUM_SCALARS : NUM_SCALARS + num_blocks]
    is_padding_N = rows_N > last_row_1
    own_N = torch.minimum(rows_N, last_row_1)
    positions_N = start_1 + own_N
    blocks_N = table_T.index_select(0, positions_N // kv_block_size)
    slots_N = blocks_N * kv_block_size + positions_N % kv_block_size
    return PromptRows(
        ids_target_N=ids_N.index_select(0, own_N),
        positions_N=positions_N,
        kv_slots_N=slots_N.masked_fill(is_padding_N, 0),
        row_request_N=is_padding_N.to(torch.int32),
        block_tables_2T=torch.stack((table_T, torch.zeros_like(table_T))).to(torch.int32),
        next_ids_target_N=ids_N.index_select(0, torch.minimum(rows_N + 1, last_row_1)),
        last_row_1=last_row_1,
    )
