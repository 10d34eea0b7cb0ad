"""What the host hands rounds between launches: blocks of tables, and who is in the next round.

The numbers come in an entry: int32 [2, C] that the host fills, contiguous; of a CUDA device in
pinned memory, which the kernel reads when its turn comes. An entry keeps its numbers until then.

Integers only, so that kernel and twin agree exactly.

Legend: S slots, T blocks of a table, B requests and padding, C numbers that an entry has room for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

Put = Callable[[torch.Tensor, int], None]
"""Takes an entry and how many of its columns count."""


def block_put(table_ST: torch.Tensor, entry_2C: torch.Tensor) -> Put:
    """Return what writes blocks into tables.

    Its entries hold flat places in the table, all distinct, then the blocks that go there.

    Args:
        table_ST: int32, contiguous, below 2**31 numbers.
        entry_2C: any entry; on CUDA the kernel is compiled here, with none of its columns.

    Exactness: integers.
    Sync: none.
    Graph-safe: yes, what is returned (CUDA).
    """
    assert table_ST.is_contiguous(), "places count all numbers of the table"
    assert table_ST.numel() < 2**31, "places are int32"
    if table_ST.is_cuda:
        from runtime.kernels.cuda.round_inputs import prepare_block_put

        return prepare_block_put(table_ST, entry_2C)
    return functools.partial(put_blocks_twin, table_ST)


def batch_put(
    slots_B: torch.Tensor, num_drafts_B: torch.Tensor, entry_2C: torch.Tensor, *, padding_slot: int
) -> Put:
    """Return what chooses the requests of a round; all others are padding, without drafts.

    Its entries hold slots, then each request's drafts that count.

    Args:
        slots_B: int64, contiguous, at most as long as an entry.
        num_drafts_B: int64, likewise.
        entry_2C: any entry; on CUDA the kernel is compiled here, and the round is all padding.
        padding_slot: slot of padding.

    Exactness: integers.
    Sync: none.
    Graph-safe: yes, what is returned (CUDA).
    """
    assert slots_B.shape == num_drafts_B.shape, "every request has a number of drafts"
    assert slots_B.shape[0] <= entry_2C.shape[1], "an entry holds a whole round"
    if slots_B.is_cuda:
        from runtime.kernels.cuda.round_inputs import prepare_batch_put

        return prepare_batch_put(slots_B, num_drafts_B, entry_2C, padding_slot)
    return functools.partial(put_batch_twin, slots_B, num_drafts_B, padding_slot)


def put_blocks_twin(table_ST: torch.Tensor, entry_2C: torch.Tensor, num_cells: int) -> None:
    """Write blocks with torch."""
    places, blocks = entry_2C[:, :num_cells].unbind()
    table_ST.view(-1).index_copy_(0, places.long(), blocks)


def put_batch_twin(
    slots_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    padding_slot: int,
    entry_2C: torch.Tensor,
    num_requests: int,
) -> None:
    """Write who is in a round with torch."""
    for kept_B, given_C, rest in (
        (slots_B, entry_2C[0], padding_slot),
        (num_drafts_B, entry_2C[1], 0),
    ):
        kept_B[:num_requests].copy_(given_C[:num_requests])
        kept_B[num_requests:].fill_(rest)
