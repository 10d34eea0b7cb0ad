"""Which token a draft's logits propose: their best one, or the one that the target's noise picks.

Legend: N rows, M rows of sampled requests, H draft hidden, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from runtime.spec.host import on_device
from runtime.spec.noise import gumbel_at
from runtime.spec.sampling import choose_with, filter_ids, noise_key, scale
from runtime.spec.types import RequestView


class DraftHead(Protocol):
    """The head of a draft and the map of its ids."""

    @property
    def draft_to_target_R(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Absolute target id of each draft id, int64."""

    def logits(self, head_input_MH: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [M, R] over draft ids."""

    def propose_ids(self, head_input_MH: torch.Tensor) -> torch.Tensor:
        """Return int64 target ids [M]: the best draft id of each row, mapped."""


def choose_drafts(
    head: DraftHead, head_input_NH: torch.Tensor, views: Sequence[RequestView], *, draft_index: int
) -> torch.Tensor:
    """Return int64 target ids [N]: draft `draft_index` of each view.

    Sync: none.

    Args:
        head: of the draft.
        head_input_NH: one row per view.
        views: the requests; the first draft of a view stands at position `len(view.ids_target)`.
        draft_index: 0 for the first draft of the round.
    """
    sampled = [n for n, view in enumerate(views) if not view.params.is_greedy]
    if not sampled:
        return head.propose_ids(head_input_NH)
    rows_M = on_device(sampled, device=head_input_NH.device)
    ids_target_M = _draw(head, head_input_NH[rows_M], [views[n] for n in sampled], draft_index)
    if len(sampled) == len(views):
        return ids_target_M
    ids_target_N = head.propose_ids(head_input_NH)
    return ids_target_N.index_copy(0, rows_M, ids_target_M)


def _draw(
    head: DraftHead, head_input_MH: torch.Tensor, views: Sequence[RequestView], draft_index: int
) -> torch.Tensor:
    """Return int64 target ids [M] of sampled views, with the target's noise."""
    logits_MR = head.logits(head_input_MH)
    keys = [noise_key(view.params, len(view.ids_target) + draft_index) for view in views]
    noise_MR = gumbel_at(keys, head.draft_to_target_R)
    ids_draft_M = torch.stack(
        [
            choose_with(
                filter_ids(scale(logits_MR[m], view.params.temperature), view.params),
                noise_MR[m],
            )
            for m, view in enumerate(views)
        ]
    )
    return head.draft_to_target_R[ids_draft_M]
