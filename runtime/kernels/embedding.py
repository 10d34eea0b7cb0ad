"""Lookup of token embeddings.

Legend: N packed tokens, V rows of the table, D width.
"""

from __future__ import annotations

import torch


def embed(ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Copy the table's row of each id.

    Args:
        ids_N: int64 [N], vocabulary of the table.
        weight_VD: [V, D].

    Returns:
        [N, D], dtype of the table.

    Exactness: a copy; torch's gather serves CPU and CUDA alike.
    Graph-safe: yes (CUDA).
    """
    return torch.index_select(weight_VD, 0, ids_N)
