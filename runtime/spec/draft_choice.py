"""Which token a draft's logits propose, and the law that it was drawn from.

A greedy request gets the draft's best token. A seeded one gets the token that the target's own
noise picks from the draft's processed law: equal laws then give equal tokens. A request in
rejection mode gets a draw with noise of its own, and the law goes with the proposal.

Legend: N rows, M rows of sampled requests, B views, G drafts, H draft hidden, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from runtime.batch import RoundRequests, on_device
from runtime.kernels.draw import draw_tokens, of_rows, row_laws, row_noise
from runtime.kernels.head import HeadRows
from runtime.kernels.noise import TOKEN_DRAW
from runtime.kernels.sample import sample
from runtime.spec.noise import DrawKind, draft_kind, noise_rows
from runtime.spec.sampling import law_rows, noise_key
from runtime.spec.types import DraftLaw, RequestView


class DraftHead(Protocol):
    """The head of a draft and the map of its ids."""

    @property
    def draft_to_target_R(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Absolute target id of each draft id, int64."""

    def logits(self, head_input_MH: HeadRows) -> torch.Tensor:
        """Return fp32 logits [M, R] over draft ids."""

    def propose_ids(
        self, head_input_MH: HeadRows, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int64 target ids [M]: the best draft id of each row, mapped.

        `copy_M`, with any stride, takes them, too.
        """


class DraftLaws:
    """Keeps the laws that the drafts of one round are drawn from, where they are asked for."""

    def __init__(self, head: DraftHead, views: Sequence[RequestView], *, num_drafts: int) -> None:
        """Start without laws.

        Args:
            head: of the draft.
            views: of the round, in the proposal's order.
            num_drafts: of the request that gets most.
        """
        self._ids_target_R = head.draft_to_target_R
        self._is_known = tuple(view.params.is_rejection for view in views)
        self._order = {id(view): b for b, view in enumerate(views)}
        self._num_drafts = num_drafts
        self._log_q_BGR: torch.Tensor | None = None

    def add(self, views: Sequence[RequestView], log_q_MR: torch.Tensor, draft_index: int) -> None:
        """Keep the log weights that a draft of each view was drawn with."""
        device = log_q_MR.device
        if self._log_q_BGR is None:
            shape = (len(self._order), self._num_drafts, self._ids_target_R.shape[0])
            # A law that is read without having been written has no ids: an error shows.
            self._log_q_BGR = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        index = on_device([self._order[id(view)] for view in views], device=device)
        self._log_q_BGR[index, draft_index] = log_q_MR

    def law(self) -> DraftLaw | None:
        """Return what was kept; None where no request asked for it."""
        if self._log_q_BGR is None:
            return None
        return DraftLaw(
            log_q_BGR=self._log_q_BGR, ids_target_R=self._ids_target_R, is_known=self._is_known
        )


def choose_drafts(
    head: DraftHead,
    head_input_NH: torch.Tensor,
    views: Sequence[RequestView],
    *,
    draft_index: int,
    laws: DraftLaws | None = None,
) -> torch.Tensor:
    """Return int64 target ids [N]: draft `draft_index` of each view.

    Args:
        head: of the draft.
        head_input_NH: one row per view.
        views: the requests; the first draft of a view stands at position `len(view.ids_target)`.
        draft_index: 0 for the first draft of the round.
        laws: takes the laws of requests in rejection mode; None: their drafts count as certain.

    Sync: none.
    """
    groups = (
        ([n for n, view in enumerate(views) if _is_seeded(view)], int(DrawKind.TOKEN)),
        ([n for n, view in enumerate(views) if view.params.is_rejection], draft_kind(draft_index)),
    )
    if not any(rows for rows, _ in groups):
        return head.propose_ids(head_input_NH)
    if sum(len(rows) for rows, _ in groups) < len(views):
        ids_target_N = head.propose_ids(head_input_NH)
    else:
        ids_target_N = head_input_NH.new_zeros(len(views), dtype=torch.int64)
    for rows, kind in groups:
        if not rows:
            continue
        rows_M = on_device(rows, device=head_input_NH.device)
        chosen = [views[n] for n in rows]
        ids_target_M, log_q_MR = _draw(head, head_input_NH[rows_M], chosen, draft_index, kind)
        ids_target_N = ids_target_N.index_copy(0, rows_M, ids_target_M)
        if laws is not None and chosen[0].params.is_rejection:
            laws.add(chosen, log_q_MR, draft_index)
    return ids_target_N


def choose_round_drafts(
    head: DraftHead, head_input_BH: HeadRows, requests: RoundRequests, *, draft_index: int
) -> torch.Tensor:
    """Return int64 target ids [B]: what `choose_drafts` chooses, inside a round on the device.

    They are in their column of `requests.drafts_BG`, too.

    Args:
        head: of the draft.
        head_input_BH: one row per request.
        requests: of the round.
        draft_index: 0 for the first draft of the round.

    Sync: none.
    """
    sampling, column_B = requests.sampling, requests.drafts_BG[:, draft_index]
    if sampling is None:
        return head.propose_ids(head_input_BH, column_B)
    map_R, logits_BR = head.draft_to_target_R, head.logits(head_input_BH)
    position_B = requests.positions_WB[draft_index]
    if requests.laws is None:
        return draw_tokens(
            logits_BR, sampling, None, position_B, TOKEN_DRAW, names_V=map_R, copy_M=column_B
        )
    rows = of_rows(sampling, None)
    law_BR = _with_ids(row_laws(logits_BR, rows))
    requests.laws.add(law_BR, map_R)
    return sample(
        law_BR,
        row_noise(rows, position_B + 1),
        draft_kind(draft_index),
        is_sampled_M=rows.is_sampled_S,
        noise_ids_V=map_R,
        names_V=map_R,
        copy_M=column_B,
    )


def _with_ids(log_q_MR: torch.Tensor) -> torch.Tensor:
    """Return the laws; one without ids, of logits that are all NaN, has its first id for certain.

    That is the id which such a row is drawn as. With no id in its law it would stay whenever the
    target may draw it at all.
    """
    is_empty_M1 = (log_q_MR == -torch.inf).all(dim=1, keepdim=True)
    return torch.cat((log_q_MR[:, :1].masked_fill(is_empty_M1, 0.0), log_q_MR[:, 1:]), dim=1)


def _is_seeded(view: RequestView) -> bool:
    return not view.params.is_greedy and not view.params.is_rejection


def _draw(
    head: DraftHead,
    head_input_MH: torch.Tensor,
    views: Sequence[RequestView],
    draft_index: int,
    kind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int64 target ids [M], fp32 log weights [M, R] that they were drawn with)."""
    log_q_MR = _with_ids(law_rows(head.logits(head_input_MH), [view.params for view in views]))
    keys = [noise_key(view.params, len(view.ids_target) + draft_index) for view in views]
    rows = noise_rows(keys, device=log_q_MR.device)
    map_R = head.draft_to_target_R
    return map_R[sample(log_q_MR, rows, kind, noise_ids_V=map_R)], log_q_MR
