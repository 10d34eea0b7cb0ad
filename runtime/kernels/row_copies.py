"""Copies of rows: out of slots, back into them, and states side by side.

Library copies would do; these may start while the kernel before them ends.

Legend: M rows, D width, S slots, A states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def take_rows(
    table_SD: torch.Tensor, index_M: torch.Tensor, *, out_MD: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [M, D], the rows of a table that an index names.

    Args:
        table_SD: [S, D].
        index_M: int64, below S.
        out_MD: takes the rows and is returned; None: a new tensor.

    Exactness: a copy.
    Graph-safe: yes (CUDA).
    """
    if table_SD.is_cuda:
        from runtime.kernels.cuda.row_copies import launch_take_rows

        return launch_take_rows(table_SD, index_M, out_MD)
    rows_MD = torch.index_select(table_SD, 0, index_M)
    return rows_MD if out_MD is None else out_MD.copy_(rows_MD)


def keep_rows(
    x_ND: torch.Tensor, rows_M: torch.Tensor, kept_SD: torch.Tensor, slots_M: torch.Tensor
) -> None:
    """Copy a row of `x_ND` into each slot.

    Args:
        x_ND: [N, D].
        rows_M: int64, below N.
        kept_SD: [S, D], written in place.
        slots_M: int64, below S. Rows that share a slot (padding) leave parts of them there.

    Exactness: a copy.
    Graph-safe: yes (CUDA).
    """
    if x_ND.is_cuda:
        from runtime.kernels.cuda.row_copies import launch_keep_rows

        launch_keep_rows(x_ND, rows_M, kept_SD, slots_M)
        return
    kept_SD.index_copy_(0, slots_M, torch.index_select(x_ND, 0, rows_M))


def side_by_side(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [M, A * D], the states of a row one after the other.

    Args:
        states: A tensors [M, D] of one dtype.

    Exactness: a copy.
    Graph-safe: yes (CUDA).
    """
    if states[0].is_cuda:
        from runtime.kernels.cuda.row_copies import launch_side_by_side

        return launch_side_by_side(states)
    return torch.cat(list(states), dim=1)
