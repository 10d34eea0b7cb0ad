"""The target's token, or a draft's, for every row of a round whose requests sample.

One function for both: log weights from logits, filters, noise by counter. Rows of greedy requests
take the highest logit. The bits are those of the eager path, which makes them request by request.

Legend: B requests, M rows, V ids of one vocabulary.
"""

from __future__ import annotations

import torch

from runtime.batch import RoundSampling
from runtime.kernels.law import FilterRows, filter_rows, scale_rows
from runtime.kernels.noise import NoiseRows
from runtime.kernels.sample import sample


def draw_tokens(
    logits_MV: torch.Tensor,
    sampling: RoundSampling,
    request_M: torch.Tensor,
    position_M: torch.Tensor,
    kind: int,
    *,
    noise_ids_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose one column of each row.

    Args:
        logits_MV: fp32.
        sampling: of the round's requests.
        request_M: int64, whose row it is.
        position_M: int64, absolute position of the token being chosen.
        kind: of the draw.
        noise_ids_V: int64, the id whose noise a column has; None: the column's number.

    Returns:
        int64 [M] columns.

    Exactness: a row depends on itself and its request alone.
    Graph-safe: yes (CUDA).
    """

    def of_row(values_B: torch.Tensor) -> torch.Tensor:
        return values_B.index_select(0, request_M)

    law_MV = scale_rows(logits_MV, of_row(sampling.temperature_B))
    if sampling.has_filters:
        filters = FilterRows(
            top_k_M=of_row(sampling.top_k_B),
            log_min_p_M=of_row(sampling.log_min_p_B),
            top_p_M=of_row(sampling.top_p_B),
        )
        law_MV = filter_rows(law_MV, filters)
    noise = NoiseRows(
        seed_low_M=of_row(sampling.seed_low_B),
        seed_high_M=of_row(sampling.seed_high_B),
        choice_index_M=of_row(sampling.choice_index_B),
        position_M=position_M,
    )
    return sample(
        law_MV,
        noise,
        kind,
        is_sampled_M=of_row(sampling.is_sampled_B),
        noise_ids_V=noise_ids_V,
    )
