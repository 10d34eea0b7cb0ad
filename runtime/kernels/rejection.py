"""Rejection mode: a draft stays with probability min(1, p/q), else a token of what q left of p.

The committed tokens then have the target's law p, whatever the draft's law q is, as long as the
draft was drawn from q and nothing else that is decided depends on that draw. A draft whose law is
not known counts as certain (q is one-hot): it stays with probability p, and the token in its place
is drawn from p without it. Both laws are the processed ones, after every option of the request.

Laws are integers over their sum (`kernels.law.masses`), so both add up to one exactly as compared.
Where rounding leaves nothing of max(p - q, 0), the token is drawn from p.

Legend: M rows, V target ids, R ids of the draft's vocabulary.
*Source:* Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.exact import exact_log
from runtime.kernels.law import masses
from runtime.kernels.noise import ACCEPT_DRAW, RESIDUAL_DRAW, NoiseRows, uniform, words_at
from runtime.kernels.sample import sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowDrafts:
    """The draft after each row.

    Args:
        ids_target_M: int64.
        log_q_MR: fp32 log weights that the draft was drawn with; None: no draft's law is known.
        ids_target_R: int64, target id of each column of `log_q_MR`.
        is_known_M: bool, whether the row's draft was drawn with its weights; None: none was.
    """

    ids_target_M: torch.Tensor
    log_q_MR: torch.Tensor | None = None
    ids_target_R: torch.Tensor | None = None
    is_known_M: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowLaws:
    """What is left to chance in each row.

    Args:
        accept_M: fp64, probability that the draft stays.
        log_residual_MV: fp64 log weights of the token in its place.
    """

    accept_M: torch.Tensor
    log_residual_MV: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowDecisions:
    """The outcome of each row.

    Args:
        is_accepted_M: bool, whether the draft stays.
        tokens_target_M: int64, the token in its place if it does not.
    """

    is_accepted_M: torch.Tensor
    tokens_target_M: torch.Tensor


def probabilities(log_weights_MV: torch.Tensor) -> torch.Tensor:
    """Return fp64 [M, V]: the law of each row of log weights; all 0 where every weight is -inf.

    Exactness: a row depends on itself alone.
    """
    lowest = torch.finfo(torch.float32).min
    highest_M1 = log_weights_MV.amax(dim=1, keepdim=True).clamp(min=lowest)
    mass_MV = masses(log_weights_MV - highest_M1)
    total_M1 = mass_MV.sum(dim=1, keepdim=True).clamp(min=1)
    return mass_MV.to(torch.float64) / total_M1.to(torch.float64)


def row_laws(log_p_MV: torch.Tensor, drafts: RowDrafts) -> RowLaws:
    """Return how likely each draft stays and the law of the token in its place.

    Args:
        log_p_MV: fp32 processed log weights of the target.
        drafts: one for each row.

    Graph-safe: yes.
    """
    p_MV = probabilities(log_p_MV)
    q_MV = _draft_laws(p_MV, drafts)
    column_M1 = drafts.ids_target_M[:, None]
    p_M, q_M = p_MV.gather(1, column_M1)[:, 0], q_MV.gather(1, column_M1)[:, 0]
    # A draft that q holds impossible was rounded away: it stays if the target may draw it.
    accept_M = torch.where(q_M > 0, (p_M / q_M).clamp(max=1.0), (p_M > 0).to(torch.float64))
    residual_MV = (p_MV - q_MV).clamp(min=0.0)
    residual_MV = torch.where((residual_MV > 0).any(dim=1, keepdim=True), residual_MV, p_MV)
    safe_MV = torch.where(residual_MV > 0, residual_MV, 1.0)
    log_residual_MV = torch.where(residual_MV > 0, exact_log(safe_MV), -torch.inf)
    return RowLaws(accept_M=accept_M, log_residual_MV=log_residual_MV)


def accept_draws(rows: NoiseRows) -> torch.Tensor:
    """Return fp64 [M] in (0, 1): the draw that decides whether a draft stays.

    Graph-safe: yes.
    """
    lane = torch.zeros(1, dtype=torch.int64, device=rows.position_M.device)
    return uniform(words_at(rows, lane, ACCEPT_DRAW))[:, 0]


def decide_rows(log_p_MV: torch.Tensor, drafts: RowDrafts, rows: NoiseRows) -> RowDecisions:
    """Decide about the draft after each row.

    Args:
        log_p_MV: fp32 processed log weights of the target.
        drafts: one for each row.
        rows: names of the draws; the position is that of the draft.

    Exactness: the law of (draft, or the token in its place) is p.
    Graph-safe: yes.
    """
    laws = row_laws(log_p_MV, drafts)
    return RowDecisions(
        is_accepted_M=accept_draws(rows) < laws.accept_M,
        tokens_target_M=sample(laws.log_residual_MV, rows, RESIDUAL_DRAW),
    )


def _draft_laws(p_MV: torch.Tensor, drafts: RowDrafts) -> torch.Tensor:
    """Return fp64 [M, V] over target ids; ids that the draft's vocabulary lacks have 0."""
    certain_MV = torch.zeros_like(p_MV).scatter_(1, drafts.ids_target_M[:, None], 1.0)
    if drafts.log_q_MR is None:
        return certain_MV
    assert drafts.ids_target_R is not None, "a law over draft ids comes with their map"
    assert drafts.is_known_M is not None, "a law comes with which rows it is of"
    columns_MR = drafts.ids_target_R.expand(p_MV.shape[0], -1)
    q_MV = torch.zeros_like(p_MV).scatter_(1, columns_MR, probabilities(drafts.log_q_MR))
    return torch.where(drafts.is_known_M[:, None], q_MV, certain_MV)
