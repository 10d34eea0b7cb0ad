"""The proposer that proposes nothing: target-only decoding is a round with no drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.batch import RoundRequests, RoundStates
from runtime.spec.host import pad_proposal
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor


class NoProposer:
    """Proposes no drafts and keeps no state."""

    name = "none"
    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False
    num_lookahead_tokens = 0

    def __init__(self, *, device: torch.device) -> None:
        """Make empty proposals on `device`."""
        self._device = device

    def max_drafts(self, view: RequestView) -> int:
        """Return 0."""
        return 0

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Return a proposal without drafts."""
        return pad_proposal([()] * len(views), device=self._device)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """Nothing: drafts follow from nothing."""
        return ()

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take over."""

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft nothing."""
        assert requests.drafts_BG.shape[1] == 0, "a round without a draft has no drafts"

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Nothing to learn."""

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Nothing to learn."""

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Nothing to learn."""

    def last_length(self, num_drafts: int) -> int | None:
        """Return None: there is no draft to limit."""
        return None
