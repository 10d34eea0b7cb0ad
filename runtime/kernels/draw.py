"""The target's token, or a draft's, for every row of a round whose requests sample.

One function for both: log weights from logits, filters, noise by counter. Rows of greedy requests
take the highest logit. The bits are those of the eager path, which makes them request by request.

Legend: B requests, M rows, V ids of one vocabulary.
"""

from __future__ import annotations

import torch

from runtime.batch import RoundRequests, RoundSampling
from runtime.kernels.law import FilterRows, filter_rows, scale_rows
from runtime.kernels.noise import TOKEN_DRAW, NoiseRows
from runtime.kernels.rejection import RowDrafts, decide_rows
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
    return sample(
        round_laws(logits_MV, sampling, request_M),
        round_noise(sampling, request_M, position_M),
        kind,
        is_sampled_M=sampling.is_sampled_B.index_select(0, request_M),
        noise_ids_V=noise_ids_V,
    )


def round_laws(
    logits_MV: torch.Tensor, sampling: RoundSampling, request_M: torch.Tensor | None
) -> torch.Tensor:
    """Return fp32 [M, V]: log weights of the law of each row; arguments as of `draw_tokens`.

    Without `request_M` row b is request b's.

    Graph-safe: yes.
    """
    law_MV = scale_rows(logits_MV, _of_rows(sampling.temperature_B, request_M))
    if not sampling.has_filters:
        return law_MV
    filters = FilterRows(
        top_k_M=_of_rows(sampling.top_k_B, request_M),
        log_min_p_M=_of_rows(sampling.log_min_p_B, request_M),
        top_p_M=_of_rows(sampling.top_p_B, request_M),
    )
    return filter_rows(law_MV, filters)


def round_noise(
    sampling: RoundSampling, request_M: torch.Tensor | None, position_M: torch.Tensor
) -> NoiseRows:
    """Return what names the draws of each row; arguments as of `round_laws`.

    Graph-safe: yes.
    """
    return NoiseRows(
        seed_low_M=_of_rows(sampling.seed_low_B, request_M),
        seed_high_M=_of_rows(sampling.seed_high_B, request_M),
        choice_index_M=_of_rows(sampling.choice_index_B, request_M),
        position_M=position_M,
    )


def _of_rows(column_B: torch.Tensor, request_M: torch.Tensor | None) -> torch.Tensor:
    return column_B if request_M is None else column_B.index_select(0, request_M)


def draw_accepted(
    logits_MV: torch.Tensor,
    requests: RoundRequests,
    drafts_BG: torch.Tensor,
    *,
    rows_M: torch.Tensor,
) -> torch.Tensor:
    """Choose the target's token of each row in rejection mode: the draft after it where that stays.

    A draft that does not stay is never the token in its place, so comparing them tells which.

    Args:
        logits_MV: fp32, the target's.
        requests: of a dense round in rejection mode; their laws are those of the drafts.
        drafts_BG: int64 target ids, G of 1 or more.
        rows_M: int64, which of the round's B W rows.

    Returns:
        int64 [M] target ids.

    Graph-safe: yes (CUDA).
    """
    sampling, laws = requests.sampling, requests.laws
    assert sampling is not None, "a round in rejection mode samples"
    assert laws is not None, "a round in rejection mode takes laws"
    count = drafts_BG.shape[1]
    request_M, place_M = rows_M // (count + 1), rows_M % (count + 1)
    noise = round_noise(sampling, request_M, requests.lengths_B[request_M] + place_M + 1)
    law_MV = round_laws(logits_MV, sampling, request_M)
    is_sampled_M = sampling.is_sampled_B.index_select(0, request_M)
    tokens_M = sample(law_MV, noise, TOKEN_DRAW, is_sampled_M=is_sampled_M)
    cell_M = place_M.clamp(max=count - 1)
    draft_M = drafts_BG[request_M, cell_M]
    drafts = RowDrafts(ids_target_M=draft_M)
    if laws.log_q:
        assert len(laws.log_q) == count, "a draft model hands over the laws of all its drafts"
        drafts = RowDrafts(
            ids_target_M=draft_M,
            log_q_MR=torch.stack(laws.log_q, dim=1)[request_M, cell_M],
            ids_target_R=laws.maps[0],
            is_known_M=torch.ones_like(is_sampled_M),
        )
    decided = decide_rows(law_MV, drafts, noise)
    drawn_M = torch.where(decided.is_accepted_M, draft_M, decided.tokens_target_M)
    is_drawn_M = is_sampled_M & (place_M < requests.num_drafts_B[request_M])
    return torch.where(is_drawn_M, drawn_M, tokens_M)
