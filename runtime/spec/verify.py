"""Verification: the target chooses a token at every row, and a draft stays or makes room for it.

Row j of a request (j = 0: its newest token, j > 0: its draft j - 1) yields `chosen[j]`, the token
after the row's context. Draft j stays iff it is that token (`runtime.kernels.accept`): the longest
prefix of drafts that stay is committed, and `chosen` of the row after it.

Greedy and seeded sampling: `chosen[j]` is the token that target-only decoding commits there under
the same seed. So no committed token depends on a draft. Rejection mode: whether draft j stays is
drawn (`runtime.kernels.rejection`), `chosen[j]` is the draft or a token that is not it, and the law
of the committed tokens does not depend on the drafts.

Legend: N rows of the target forward, B requests, G drafts, W = G + 1, M rows that need logits,
V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.batch import on_device
from runtime.kernels.accept import accept
from runtime.kernels.masks import NO_FAULT, drafts_before_faults, row_faults
from runtime.kernels.rejection import RowDrafts, decide_rows
from runtime.kernels.sample import sample
from runtime.spec.logprobs import token_logprobs
from runtime.spec.noise import DrawKind, NoiseKey, noise_rows
from runtime.spec.row_faults import first_faults
from runtime.spec.sampling import TokenCounts, has_penalties, noise_key, process_logits
from runtime.spec.types import (
    Proposal,
    RequestView,
    RoundResult,
    SamplingParams,
    TokenLogprobs,
)
from specctl.contract.diagnostics import DiagnosticError

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
        allowed: per view, bool [rows of the view, V]: ids that a grammar allows at each row (see
            `runtime.spec.masks`), None where it allows all. Empty: no request has a grammar.
    """

    views: tuple[RequestView, ...]
    first_row: tuple[int, ...]
    allowed: tuple[torch.Tensor | None, ...] = ()

    def allowed_of(self, index: int) -> torch.Tensor | None:
        """Return the mask of a view."""
        return self.allowed[index] if self.allowed else None

    def is_plain(self, index: int) -> bool:
        """Whether the tokens of a view are the argmax of the target's own logits."""
        return self.views[index].params.is_plain_greedy and self.allowed_of(index) is None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choices:
    """What the rows of a target forward yield; rows of no view hold anything.

    Args:
        chosen_N: int64 target ids, the token after each row.
        faults_N: int64, codes of `row_faults`; None: no row can have one.
    """

    chosen_N: torch.Tensor
    faults_N: torch.Tensor | None = None


def verify(
    target: TargetHead, hidden_ND: torch.Tensor, rows: VerifyRows, proposal: Proposal
) -> RoundResult:
    """Decide which drafts stay and which token follows them.

    Args:
        target: head of the target.
        hidden_ND: the target's last hidden states, input of its head.
        rows: where each request's rows are; rows of other requests are ignored.
        proposal: the drafts that were in those rows.

    Raises:
        DiagnosticError: SD923, SD924 at `request=<id>`: no token can be chosen.

    Exactness: every chosen token depends on its own row, the request's tokens before it, its
    parameters and its seed only; in rejection mode on the drafts and their laws, too.
    Sync: one, at the end; one before it when a request has penalties and one after it when one
    wants log probabilities.
    """
    result = _accept(_choose(target, hidden_ND, rows, proposal), rows, proposal)
    if all(view.params.num_logprobs is None for view in rows.views):
        return result
    return RoundResult(
        committed=result.committed,
        num_drafts=result.num_drafts,
        num_accepted_drafts=result.num_accepted_drafts,
        logprobs=_logprobs(target, hidden_ND, rows, result),
    )


def _accept(choices: Choices, rows: VerifyRows, proposal: Proposal) -> RoundResult:
    """Accept the longest prefix of drafts that stay.

    Args:
        choices: of the rows of the target forward.
        rows: where each request's rows are.
        proposal: the drafts that were in those rows.

    Raises:
        DiagnosticError: SD923, SD924, see `verify`.

    Sync: one.
    """
    device = choices.chosen_N.device
    drafts_BG = proposal.ids_target_BG
    width = drafts_BG.shape[1] + 1
    if not rows.views:
        return RoundResult(committed=(), num_drafts=(), num_accepted_drafts=())
    num_drafts_B = on_device(proposal.num_drafts, device=device)
    first_B1 = on_device(rows.first_row, device=device)[:, None]
    offset_W = torch.arange(width, dtype=torch.int64, device=device)
    # Offsets beyond a request's drafts read its last row again; they are never accepted.
    row_BW = first_B1 + torch.minimum(offset_W, num_drafts_B[:, None])
    if choices.faults_N is not None:
        num_drafts_B = drafts_before_faults(num_drafts_B, choices.faults_N[row_BW])
    accepted_B, committed_BW = accept(drafts_BG, choices.chosen_N[row_BW], num_drafts_B)
    parts = [accepted_B[:, None], committed_BW]
    if choices.faults_N is not None:
        parts.append(
            torch.where(offset_W <= accepted_B[:, None], choices.faults_N[row_BW], NO_FAULT)
        )
    table: list[list[int]] = torch.cat(parts, dim=1).tolist()
    if choices.faults_N is not None:
        problems = first_faults(rows.views, [row[1 + width :] for row in table])
        if problems:
            raise DiagnosticError(problems)
    return RoundResult(
        committed=tuple(tuple(row[1 : row[0] + 2]) for row in table),
        num_drafts=proposal.num_drafts,
        num_accepted_drafts=tuple(row[0] for row in table),
    )


def _choose(
    target: TargetHead, hidden_ND: torch.Tensor, rows: VerifyRows, proposal: Proposal
) -> Choices:
    """Return the target's choices at the rows that belong to a view."""
    plain: list[int] = []
    other: list[int] = []
    for b, (first, count) in enumerate(zip(rows.first_row, proposal.num_drafts, strict=True)):
        (plain if rows.is_plain(b) else other).extend(range(first, first + count + 1))
    num_rows, device = hidden_ND.shape[0], hidden_ND.device
    if len(plain) == num_rows:
        return Choices(chosen_N=target.greedy_ids(hidden_ND))
    chosen_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
    if plain:
        index = on_device(plain, device=device)
        chosen_N[index] = target.greedy_ids(hidden_ND[index])
    if not other:
        return Choices(chosen_N=chosen_N)
    faults_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
    wishes = _row_choices(rows, proposal)
    for start in range(0, len(other), _ROWS_PER_PASS):
        part = slice(start, start + _ROWS_PER_PASS)
        index = on_device(other[part], device=device)
        done = _choose_rows(target.logits(hidden_ND[index]), wishes[part], proposal)
        chosen_N[index], faults_N[index] = done
    return Choices(chosen_N=chosen_N, faults_N=faults_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowChoice:
    """One row whose logits are needed: the request's options and what they must know.

    Args:
        view_index: of the request.
        row_index: 0 for the row of the newest token.
        has_draft: whether a draft follows the row.
        allowed_V: ids that a grammar allows; None allows all.
    """

    params: SamplingParams
    counts: TokenCounts
    position: int
    view_index: int
    row_index: int
    has_draft: bool
    allowed_V: torch.Tensor | None

    @property
    def is_drawn(self) -> bool:
        """Whether it is drawn if the draft after the row stays."""
        return self.has_draft and self.params.is_rejection


def _row_choices(rows: VerifyRows, proposal: Proposal) -> list[_RowChoice]:
    """Describe the rows of the views that are not plain, in row order.

    Row j sees the request's tokens followed by drafts[:j]: its choice counts only if they stay.
    """
    are_drafts_needed = any(has_penalties(view.params) for view in rows.views)
    drafts = proposal.ids_target_BG.tolist() if are_drafts_needed else []
    choices: list[_RowChoice] = []
    for b, view in enumerate(rows.views):
        if rows.is_plain(b):
            continue
        num_tokens, num_drafts = len(view.ids_target), proposal.num_drafts[b]
        committed = TokenCounts.of(view) if has_penalties(view.params) else None
        allowed_WV = rows.allowed_of(b)
        for j in range(num_drafts + 1):
            counts = (
                TokenCounts(num_output=num_tokens + j - view.num_prompt_tokens)
                if committed is None
                else committed.followed_by(drafts[b][:j])
            )
            choices.append(
                _RowChoice(
                    params=view.params,
                    counts=counts,
                    position=num_tokens + j,
                    view_index=b,
                    row_index=j,
                    has_draft=j < num_drafts,
                    allowed_V=None if allowed_WV is None else allowed_WV[j],
                )
            )
    return choices


def _choose_rows(
    logits_MV: torch.Tensor, choices: Sequence[_RowChoice], proposal: Proposal
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (chosen int64 [M], faults int64 [M]).

    The noise of all rows is made at once: it has the same bits in any batch.
    """
    device = logits_MV.device
    processed_MV = torch.stack(
        [
            process_logits(logits_MV[m], choice.params, choice.counts, choice.allowed_V)
            for m, choice in enumerate(choices)
        ]
    )
    noise = noise_rows([_key(choice) for choice in choices], device=device)
    is_sampled = [not choice.params.is_greedy for choice in choices]
    chosen_M = sample(
        processed_MV,
        noise,
        DrawKind.TOKEN,
        is_sampled_M=on_device(is_sampled, dtype=torch.bool, device=device),
    )
    drawn = [m for m, choice in enumerate(choices) if choice.is_drawn]
    if drawn:
        index = on_device(drawn, device=device)
        drafts = _row_drafts([choices[m] for m in drawn], proposal)
        keys = [_key(choices[m]) for m in drawn]
        decided = decide_rows(processed_MV[index], drafts, noise_rows(keys, device=device))
        chosen_M[index] = torch.where(
            decided.is_accepted_M, drafts.ids_target_M, decided.tokens_target_M
        )
    return chosen_M, row_faults(logits_MV, processed_MV)


def _key(choice: _RowChoice) -> NoiseKey:
    return noise_key(choice.params, choice.position)


def _row_drafts(choices: Sequence[_RowChoice], proposal: Proposal) -> RowDrafts:
    """Return the draft after each row, with its law where it is known."""
    device = proposal.ids_target_BG.device
    views = on_device([choice.view_index for choice in choices], device=device)
    places = on_device([choice.row_index for choice in choices], device=device)
    ids_target_M = proposal.ids_target_BG[views, places]
    if proposal.q is None:
        return RowDrafts(ids_target_M=ids_target_M)
    is_known = [proposal.q.is_known[choice.view_index] for choice in choices]
    return RowDrafts(
        ids_target_M=ids_target_M,
        log_q_MR=proposal.q.log_q_BGR[views, places],
        ids_target_R=proposal.q.ids_target_R,
        is_known_M=on_device(is_known, dtype=torch.bool, device=device),
    )


def _logprobs(
    target: TargetHead, hidden_ND: torch.Tensor, rows: VerifyRows, result: RoundResult
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """Return the log probabilities of committed tokens, of the views that want them."""
    wanted = [b for b, view in enumerate(rows.views) if view.params.num_logprobs is not None]
    places = [(b, j) for b in wanted for j in range(len(result.committed[b]))]
    entries: list[list[TokenLogprobs]] = [[] for _ in rows.views]
    device = hidden_ND.device
    num_top = max(rows.views[b].params.num_logprobs or 0 for b in wanted)
    for start in range(0, len(places), _ROWS_PER_PASS):
        part = places[start : start + _ROWS_PER_PASS]
        index = on_device([rows.first_row[b] + j for b, j in part], device=device)
        tokens = on_device([result.committed[b][j] for b, j in part], device=device)
        found = token_logprobs(target.logits(hidden_ND[index]), tokens, num_top)
        for (b, _), entry in zip(part, found, strict=True):
            count = rows.views[b].params.num_logprobs or 0
            entries[b].append(TokenLogprobs(logprob=entry.logprob, top=entry.top[:count]))
    return tuple(tuple(row) for row in entries)
