"""Prompt lookup: propose what followed the last time the newest tokens occurred.

The longest suffix of the request's tokens, at most `max_ngram` long, that occurs earlier wins;
among equal lengths the most recent occurrence. No weights, no state.

*Source:* Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.spec.host import pad_proposal
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor

DEFAULT_MAX_NGRAM = 4


def lookup(ids_target: Sequence[int], *, max_ngram: int, num_drafts: int) -> list[int]:
    """Return up to `num_drafts` tokens that followed the best earlier match of the suffix.

    Args:
        ids_target: prompt and output, newest last.
        max_ngram: longest suffix that is compared, at least 1.
        num_drafts: tokens wanted; fewer come back where the sequence ends before.
    """
    ids = list(ids_target)
    newest = len(ids) - 1
    best_length, best_end = 0, -1
    for end in range(newest - 1, -1, -1):
        if ids[end] != ids[newest]:
            continue
        length = 1
        while length < min(max_ngram, end + 1) and ids[end - length] == ids[newest - length]:
            length += 1
        if length > best_length:
            best_length, best_end = length, end
        if best_length == max_ngram:
            break
    return ids[best_end + 1 : best_end + 1 + num_drafts] if best_length else []


class NgramProposer:
    """Drafts by prompt lookup on the host."""

    name = "ngram"
    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False
    num_lookahead_tokens = 0

    def __init__(self, *, device: torch.device, max_ngram: int = DEFAULT_MAX_NGRAM) -> None:
        """Compare suffixes of at most `max_ngram` tokens; proposals are made on `device`."""
        assert max_ngram >= 1, f"max_ngram must be at least 1, not {max_ngram}"
        self._device = device
        self._max_ngram = max_ngram

    def max_drafts(self, view: RequestView) -> int:
        """Return what is wanted: lookup has no position limit."""
        return view.num_drafts

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Look the suffix of every request up in its own tokens."""
        drafts = [
            lookup(view.ids_target, max_ngram=self._max_ngram, num_drafts=view.num_drafts)
            for view in views
        ]
        return pad_proposal(drafts, device=self._device)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn: the views carry every token."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """Nothing: drafts follow from the request's tokens."""
        return ()

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take over: the views carry every token."""
