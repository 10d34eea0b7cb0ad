"""A draw from the law that log weights stand for: argmax of weight plus Gumbel noise.

Argmax of log weights plus independent standard Gumbel values is a draw from the law with those
weights (Gumbel-max), so the weights need no normalisation. A tie goes to the lowest id.

Legend: M rows, V ids, R their number in a reduced vocabulary.
"""

from __future__ import annotations

import torch

from runtime.kernels.noise import NoiseRows, gumbel_noise


def sample(
    weights_MV: torch.Tensor,
    rows: NoiseRows,
    kind: int,
    *,
    is_sampled_M: torch.Tensor | None = None,
    noise_ids_V: torch.Tensor | None = None,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one column of each row.

    Args:
        weights_MV: float32 or float64 log weights up to a constant; -inf is never drawn unless all
            are; no NaN.
        rows: what names the draws.
        kind: of the draw.
        is_sampled_M: bool; False takes the highest weight without noise. None: all True.
        noise_ids_V: int64, the id whose noise a column has; None: the column's number.
        names_V: int64, what columns are called in the result; None: their numbers.
        copy_M: int64 [M] with any stride, takes the result, too; None: nobody does.

    Returns:
        int64 [M] columns, contiguous.

    Exactness: the noise and each sum depend on the row and the column alone.
    Graph-safe: yes (CUDA).
    """
    if weights_MV.is_cuda:
        from runtime.kernels.cuda.sample import launch_sample

        return launch_sample(
            weights_MV, rows, kind, is_sampled_M, noise_ids_V, names_V=names_V, copy_M=copy_M
        )
    columns_M = sample_twin(
        weights_MV, rows, kind, is_sampled_M=is_sampled_M, noise_ids_V=noise_ids_V
    )
    if names_V is not None:
        columns_M = names_V[columns_M]
    if copy_M is not None:
        copy_M.copy_(columns_M)
    return columns_M


def sample_twin(
    weights_MV: torch.Tensor,
    rows: NoiseRows,
    kind: int,
    *,
    is_sampled_M: torch.Tensor | None = None,
    noise_ids_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `sample` without names with torch."""
    count = weights_MV.shape[1]
    noise_MV = gumbel_noise(rows, count, kind, ids_R=noise_ids_V)
    if is_sampled_M is not None:
        noise_MV = torch.where(is_sampled_M[:, None], noise_MV, 0.0)
    scores_MV = weights_MV + noise_MV
    columns_V = torch.arange(count, device=weights_MV.device)
    is_best_MV = scores_MV == scores_MV.amax(dim=1, keepdim=True)
    return torch.where(is_best_MV, columns_V, count - 1).amin(dim=1)
