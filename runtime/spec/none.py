"""The proposer that proposes nothing: target-only decoding is a round with no drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.spec.host import pad_proposal
from runtime.spec.types import Observation, Proposal, RequestView


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
