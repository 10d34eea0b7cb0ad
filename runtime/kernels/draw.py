"""The target's token, or a draft's, for every row of a round whose requests sample.

One function for both: log weights from logits, filters, noise by counter. Rows of greedy requests
take the highest logit. The bits are those of the eager path, which makes them request by request.

Legend: B requests, M rows, V ids of one vocabulary.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from runtime.batch import RoundRequests, RoundSampling
from runtime.kernels.law import FilterRows, filter_rows, scale_rows
from runtime.kernels.noise import TOKEN_DRAW, NoiseRows
from runtime.kernels.rejection import RowDrafts, decide_rows
from runtime.kernels.sample import sample


def draw_tokens(
    logits_MV: torch.Tensor,
    sampling: RoundSampling,
    request_M: torch.Tensor | None,
    position_M: torch.Tensor,
    kind: int,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose one column of each row.

    Args:
        logits_MV: fp32.
        sampling: of the round's requests.
        request_M: int32, whose row it is; a number beyond the requests counts as the last one's,
            as padding rows have it. None: row b is request b's.
        position_M: int64, absolute position of the row; the token being chosen is at the next one.
        kind: of the draw.
        names_V: int64, the id that a column stands for: its noise is that id's, and so is the
            result. None: the column's number.
        copy_M: int64 [M] with any stride, takes the result, too; None: nobody does.

    Returns:
        int64 [M] columns, by their names.

    Exactness: a row depends on itself and its request alone.
    Graph-safe: yes (CUDA).
    """
    if not logits_MV.is_cuda:
        draw = draw_tokens_twin
    elif sampling.has_filters:
        from runtime.kernels.cuda.filtered_draw import launch_filtered_draw as draw
    else:
        from runtime.kernels.cuda.draw import launch_draw as draw
    return draw(logits_MV, sampling, request_M, position_M, kind, names_V=names_V, copy_M=copy_M)


def draw_tokens_twin(
    logits_MV: torch.Tensor,
    sampling: RoundSampling,
    request_M: torch.Tensor | None,
    position_M: torch.Tensor,
    kind: int,
    *,
    names_V: torch.Tensor | None = None,
    copy_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `draw_tokens` as the eager path does: the law of each row, then a draw from it."""
    rows = of_rows(sampling, request_M)
    return sample(
        row_laws(logits_MV, rows),
        row_noise(rows, position_M + 1),
        kind,
        is_sampled_M=rows.is_sampled_S,
        noise_ids_V=names_V,
        names_V=names_V,
        copy_M=copy_M,
    )


def of_rows(sampling: RoundSampling, request_M: torch.Tensor | None) -> RoundSampling:
    """Return columns with a cell for each row, in the place of slots; see `draw_tokens`.

    Graph-safe: yes.
    """
    cell_M = sampling.slots_B
    if request_M is not None:
        slots_B = sampling.is_sampled_S if cell_M is None else cell_M
        request_M = request_M.long().clamp(max=slots_B.shape[0] - 1)
        cell_M = request_M if cell_M is None else cell_M.index_select(0, request_M)
    if cell_M is None:
        return sampling
    cells = {
        item.name: getattr(sampling, item.name).index_select(0, cell_M)
        for item in fields(sampling)
        if item.name.endswith("_S")
    }
    return RoundSampling(**cells, slots_B=None, has_filters=sampling.has_filters)


def row_laws(logits_MV: torch.Tensor, rows: RoundSampling) -> torch.Tensor:
    """Return fp32 [M, V]: log weights of the law of each row.

    Args:
        logits_MV: fp32.
        rows: from `of_rows`.

    Graph-safe: yes.
    """
    law_MV = scale_rows(logits_MV, rows.temperature_S)
    if not rows.has_filters:
        return law_MV
    filters = FilterRows(top_k_M=rows.top_k_S, log_min_p_M=rows.log_min_p_S, top_p_M=rows.top_p_S)
    return filter_rows(law_MV, filters)


def row_noise(rows: RoundSampling, position_M: torch.Tensor) -> NoiseRows:
    """Return what names the draws of each row.

    Args:
        rows: from `of_rows`.
        position_M: int64, of the token being chosen.
    """
    return NoiseRows(
        seed_low_M=rows.seed_low_S,
        seed_high_M=rows.seed_high_S,
        choice_index_M=rows.choice_index_S,
        position_M=position_M,
    )


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
    rows = of_rows(sampling, request_M)
    noise = row_noise(rows, requests.lengths_B[request_M] + place_M + 1)
    law_MV, is_sampled_M = row_laws(logits_MV, rows), rows.is_sampled_S
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
