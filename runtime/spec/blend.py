"""A draft some of whose drafts are replaced, so that random weights meet every acceptance pattern.

The draft's own forward runs in full, eagerly or inside a round on the device, and keeps its state
as always: states and keys of committed positions come from the target's states, so what was
proposed instead never reaches them. The script decides which ids are replaced by the target's known
continuation and which by ids that are surely wrong (`OracleScript`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from runtime.batch import ConfidentDraft, RoundRequests, RoundStates, on_device
from runtime.spec.script_table import OracleScript, Room, ScriptTable
from runtime.spec.types import DeviceProposer, Observation, Proposal, RequestView, SlotTensor


class BlendedProposer:
    """Runs a draft and replaces what it proposes where the script says so."""

    def __init__(
        self, inner: DeviceProposer, script: OracleScript, room: Room, *, device: torch.device
    ) -> None:
        """Follow a script without verbatim rounds beside `inner`."""
        self.name: str = inner.name
        self.aux_layer_ids = inner.aux_layer_ids
        self.needs_final_hidden = inner.needs_final_hidden
        self.num_lookahead_tokens = inner.num_lookahead_tokens
        self.inner = inner
        self.has_confidence = isinstance(inner, ConfidentDraft) and inner.has_confidence
        self.confidence_SG = (
            inner.confidence_SG
            if isinstance(inner, ConfidentDraft)
            else torch.ones((room.num_slots, room.max_drafts), device=device)
        )
        self._device = device
        self._table = ScriptTable(script, room, device=device)

    def max_drafts(self, view: RequestView) -> int:
        """Return what the draft grants."""
        return self.inner.max_drafts(view)

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Return the draft's proposal with ids replaced; every draft counts as certain.

        Sync: none.
        """
        proposal = self.inner.propose(views)
        active = [b for b, count in enumerate(proposal.num_drafts) if count]
        if not active:
            return proposal
        self._table.load([views[b] for b in active])
        depth = proposal.ids_target_BG.shape[1]
        index = on_device(active, device=self._device)
        blended_BG = self._table.drafts(
            on_device([views[b].slot for b in active], device=self._device),
            on_device([len(views[b].ids_target) - 1 for b in active], device=self._device),
            proposal.ids_target_BG[index],
            depth,
        )
        counts_B = on_device([proposal.num_drafts[b] for b in active], device=self._device)
        is_draft_BG = torch.arange(depth, device=self._device) < counts_B[:, None]
        ids_target_BG = proposal.ids_target_BG.index_copy(0, index, blended_BG * is_draft_BG)
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=proposal.num_drafts)

    def observe(self, observation: Observation) -> None:
        """Hand the states to the draft; write down what the script says about new requests.

        Sync: none.
        """
        self.inner.observe(observation)
        self._table.load(observation.views)

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft as the draft does, with ids replaced; see `RoundDraft`.

        Sync: none.
        """
        # Replaced ids were not drawn from the draft's laws: no law is handed over.
        self.inner.draft_round(_without_laws(requests))
        drafts_BG = requests.drafts_BG
        if drafts_BG.shape[1]:
            drafts_BG.copy_(
                self._table.drafts(
                    requests.slots_B, requests.lengths_B, drafts_BG, drafts_BG.shape[1]
                )
            )

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Hand the states to the draft.

        Sync: none.
        """
        self.inner.observe_round(requests, states)

    def last_length(self, num_drafts: int) -> int | None:
        """Return what the draft grants."""
        return self.inner.last_length(num_drafts)

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self.inner.release(slot)
        self._table.release(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """What the draft keeps."""
        return self.inner.slot_state

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of what the draft keeps."""
        return self.inner.export_slot(slot)

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Hand the state to the draft; write down what the script says about the request."""
        self.inner.import_slot(view, state)
        self._table.load([view])


def _without_laws(requests: RoundRequests) -> RoundRequests:
    return requests if requests.laws is None else replace(requests, laws=None)
