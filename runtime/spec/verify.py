"""Verification: the target chooses a token at every row, and a draft stays iff it is that token.

Greedy and seeded sampling share one rule. Row j of a request (j = 0: its newest token, j > 0: its
draft j - 1) yields `chosen[j]`, the token that target-only decoding commits after the row's context
under the same seed. The accepted drafts are the longest prefix with `drafts[j] == chosen[j]`, and
`chosen[:accepted + 1]` is committed: no committed token depends on a draft.

Legend: N rows of the target forward, B requests, G drafts, W = G + 1, M rows that need logits,
V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.spec.host import on_device
from runtime.spec.noise import gumbel_rows
from runtime.spec.sampling import (
    TokenCounts,
    choose_with,
    has_penalties,
    noise_key,
    process_logits,
)
from runtime.spec.types import Proposal, RequestView, RoundResult, SamplingParams

# Rows whose logits and noise exist at once: the noise of a row over 150,000 ids passes through
# some ten tensors of 1.2 MB each.
_ROWS_PER_PASS = 64


class TargetHead(Protocol):
    """The part of a target model that turns hidden states into choices (`TargetModel` has it)."""

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [M, V]; rows of the vocabulary that are padding hold -inf."""

    def greedy_ids(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return int64 [M]: the lowest target id among those with the highest logit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyRows:
    """Which rows of the target's hidden states belong to which request.

    Args:
        views: the requests as they stand before the round, in the proposal's order.
        first_row: per view, index of the row of its newest token; the rows of its drafts follow it.
    """

    views: tuple[RequestView, ...]
    first_row: tuple[int, ...]


def verify(
    target: TargetHead, hidden_ND: torch.Tensor, rows: VerifyRows, proposal: Proposal
) -> RoundResult:
    """Decide which drafts stay and which token follows them.

    Args:
        target: head of the target.
        hidden_ND: the target's last hidden states, input of its head.
        rows: where each request's rows are; rows of other requests are ignored.
        proposal: the drafts that were in those rows.

    Exactness: every chosen token depends on its own row, the request's tokens before it, its
    parameters and its seed only.
    Sync: one, at the end; one more before it when a request has penalties.
    """
    chosen_N = _chosen_ids(target, hidden_ND, rows, proposal)
    return accept(chosen_N, rows, proposal)


def accept(chosen_N: torch.Tensor, rows: VerifyRows, proposal: Proposal) -> RoundResult:
    """Accept the longest prefix of drafts that equal the target's choices.

    Args:
        chosen_N: int64 target ids, one per row of the target forward.
        rows: where each request's rows are.
        proposal: the drafts that were in those rows.

    Sync: one.
    """
    device = chosen_N.device
    drafts_BG = proposal.ids_target_BG
    num_requests, width = len(rows.views), drafts_BG.shape[1] + 1
    if num_requests == 0:
        return RoundResult(committed=(), num_drafts=(), num_accepted_drafts=())
    num_drafts_B1 = on_device(proposal.num_drafts, device=device)[:, None]
    first_B1 = on_device(rows.first_row, device=device)[:, None]
    offset_W = torch.arange(width, dtype=torch.int64, device=device)
    # Offsets beyond a request's drafts read its last row again; they are never accepted.
    chosen_BW = chosen_N[first_B1 + torch.minimum(offset_W, num_drafts_B1)]
    is_right_BG = (drafts_BG == chosen_BW[:, :-1]) & (offset_W[:-1] < num_drafts_B1)
    accepted_B1 = is_right_BG.to(torch.int64).cumprod(dim=1).sum(dim=1, keepdim=True)
    table: list[list[int]] = torch.cat([accepted_B1, chosen_BW], dim=1).tolist()
    return RoundResult(
        committed=tuple(tuple(chosen[: count + 1]) for count, *chosen in table),
        num_drafts=proposal.num_drafts,
        num_accepted_drafts=tuple(count for count, *_ in table),
    )


def _chosen_ids(
    target: TargetHead, hidden_ND: torch.Tensor, rows: VerifyRows, proposal: Proposal
) -> torch.Tensor:
    """Return int64 [N]: the target's choice at each row that belongs to a view, else 0."""
    plain: list[int] = []
    other: list[int] = []
    for view, first, count in zip(rows.views, rows.first_row, proposal.num_drafts, strict=True):
        (plain if view.params.is_plain_greedy else other).extend(range(first, first + count + 1))
    num_rows, device = hidden_ND.shape[0], hidden_ND.device
    if len(plain) == num_rows:
        return target.greedy_ids(hidden_ND)
    chosen_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
    if plain:
        index = on_device(plain, device=device)
        chosen_N[index] = target.greedy_ids(hidden_ND[index])
    choices = _row_choices(rows, proposal)
    for start in range(0, len(other), _ROWS_PER_PASS):
        part = slice(start, start + _ROWS_PER_PASS)
        index = on_device(other[part], device=device)
        chosen_N[index] = _choose_rows(target.logits(hidden_ND[index]), choices[part])
    return chosen_N


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowChoice:
    """One row whose logits are needed: the request's options and what they must know."""

    params: SamplingParams
    counts: TokenCounts
    position: int


def _row_choices(rows: VerifyRows, proposal: Proposal) -> list[_RowChoice]:
    """Describe the rows of the views that are not plain greedy, in row order.

    Row j sees the request's tokens followed by drafts[:j]: its choice counts only if they stay.
    """
    are_drafts_needed = any(has_penalties(view.params) for view in rows.views)
    drafts = proposal.ids_target_BG.tolist() if are_drafts_needed else []
    choices: list[_RowChoice] = []
    for b, view in enumerate(rows.views):
        if view.params.is_plain_greedy:
            continue
        num_tokens = len(view.ids_target)
        committed = TokenCounts.of(view) if has_penalties(view.params) else None
        for j in range(proposal.num_drafts[b] + 1):
            counts = (
                TokenCounts(num_output=num_tokens + j - view.num_prompt_tokens)
                if committed is None
                else committed.followed_by(drafts[b][:j])
            )
            choices.append(_RowChoice(params=view.params, counts=counts, position=num_tokens + j))
    return choices


def _choose_rows(logits_MV: torch.Tensor, choices: Sequence[_RowChoice]) -> torch.Tensor:
    """Return int64 [M]: the choice of each row, options applied row by row.

    The noise of all rows is made at once: it has the same bits in any batch.
    """
    sampled = [m for m, choice in enumerate(choices) if not choice.params.is_greedy]
    keys = [noise_key(choices[m].params, choices[m].position) for m in sampled]
    noise = gumbel_rows(keys, num_ids=logits_MV.shape[1], device=logits_MV.device)
    noise_of = dict(zip(sampled, noise, strict=True))
    return torch.stack(
        [
            choose_with(process_logits(logits_MV[m], choice.params, choice.counts), noise_of.get(m))
            for m, choice in enumerate(choices)
        ]
    )
