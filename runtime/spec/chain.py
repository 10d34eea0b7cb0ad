"""Chain drafting: one draft token per step, each fed by the step before (EAGLE-3, EAGLE-1, MTP).

Entries are those of `runtime.spec.entries`: entry p sits at position p and proposes the token at
p + 2. A request with newest token at L (KV known for 0..L - 1) starts a round at entry L - 1; chain
entry j pairs draft j with the feedback of the step before, at position L + j.

Drafts are mapped to target ids before they are stored or fed back. A sampled request drafts the
argmax of its filtered draft log weights plus the noise that the target will use for the same
position and ids: equal laws then give equal tokens.

Legend: B views, G drafts, N rows, M rows of sampled requests, S slots, H draft hidden, R draft
vocabulary.
*Source:* Li et al., "EAGLE" and "EAGLE-3" (arXiv 2401.15077, 2503.01840), alignment of entries as
in SafeAILab's code; DeepSeek-V3 report, section 2.2 (MTP), whose layer is run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.kv import KVLayer
from runtime.models import ChainDraft
from runtime.spec.draft_choice import DraftHead, DraftLaws, choose_drafts, choose_round_drafts
from runtime.spec.dynamic_rows import DynamicRows
from runtime.spec.entries import Entries
from runtime.spec.packing import Place, pack_block_tables, pack_places
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor


class ChainProposer:
    """Runs a draft that makes one token a step; its only state is each slot's last entry."""

    num_lookahead_tokens = 1

    def __init__(
        self,
        model: ChainDraft,
        kv: Sequence[KVLayer],
        *,
        kv_block_size: int,
        num_slots: int,
        dynamic_rows: DynamicRows | None = None,
    ) -> None:
        """Run `model` over its own cache layers.

        Args:
            model: the draft.
            kv: its layers of the shared pool, addressed by the requests' block tables.
            kv_block_size: tokens of a KV block.
            num_slots: rows of the per-slot state: requests that may run at once, and one for
                padding where rounds run on the device.
            dynamic_rows: ids outside the draft's map that compete with those in it, None for none;
                of as many slots.
        """
        facts = model.facts
        self.name: str = facts.algorithm
        self.aux_layer_ids = facts.aux_layer_ids or ()
        self._model = model
        self._kv = tuple(kv)
        self._kv_block_size = kv_block_size
        self._device = model.embedding_VH.device
        self._entries = Entries(model, kv, num_slots=num_slots)
        self._dynamic_rows = dynamic_rows

    @property
    def needs_final_hidden(self) -> bool:
        """Whether entries read the target's final-normed state."""
        return self._entries.needs_final_hidden

    def max_drafts(self, view: RequestView) -> int:
        """Return the drafts whose absolute positions the draft's context still holds."""
        return max(0, min(view.num_drafts, self._model.max_positions - len(view.ids_target)))

    def observe(self, observation: Observation) -> None:
        """Run the draft on every row: the token at p + 1 with the target's state at p.

        Sync: none.
        """
        self._entries.observe(observation)
        if self._dynamic_rows is not None:
            self._dynamic_rows.follow(observation.views)

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Draft a chain for every view; views that want fewer drafts leave the chain earlier.

        Sync: none.
        """
        num_drafts = tuple(self.max_drafts(view) for view in views)
        depth = max(num_drafts, default=0)
        ids_target_BG = torch.zeros((len(views), depth), dtype=torch.int64, device=self._device)
        if depth == 0:
            return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts)
        active = [b for b, count in enumerate(num_drafts) if count > 0]
        if self._dynamic_rows is not None:
            self._dynamic_rows.follow([views[b] for b in active])
        self._entries.assert_started([views[b] for b in active])
        hidden = self._entries.newest(self._index([views[b].slot for b in active]))
        block_tables_BT = pack_block_tables(views, device=self._device)
        active_N = self._index(active)
        laws = DraftLaws(self._model, views, num_drafts=depth)
        for j in range(depth):
            drafting = [views[b] for b in active]
            head = self._head(self._index([view.slot for view in drafting]))
            ids_target_N = choose_drafts(
                head, hidden.head_input_NH, drafting, draft_index=j, laws=laws
            )
            ids_target_BG[active_N, j] = ids_target_N
            staying = [n for n, b in enumerate(active) if num_drafts[b] > j + 1]
            if not staying:
                break
            state_NH = hidden.feedback_NH
            if len(staying) < len(active):
                rows = self._index(staying)
                active, active_N = [active[n] for n in staying], active_N[rows]
                ids_target_N, state_NH = ids_target_N[rows], state_NH[rows]
            entries = pack_places(
                [Place(b, len(views[b].ids_target) - 1 + j) for b in active],
                views,
                ids_target_N=ids_target_N,
                block_tables_BT=block_tables_BT,
                kv_block_size=self._kv_block_size,
            )
            hidden = self._model.forward(entries, state_NH, self._kv)
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts, q=laws.law())

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft a chain for every request; see `RoundDraft`.

        Sync: none.
        """
        num_drafts = requests.drafts_BG.shape[1]
        if num_drafts == 0:
            return
        hidden = self._entries.newest(requests.slots_B)
        head = self._head(requests.slots_B)
        ids_target_B = choose_round_drafts(head, hidden.head_rows, requests, draft_index=0)
        for j in range(1, num_drafts):
            entries = requests.step(ids_target_B, place=j - 1)
            hidden = self._model.forward(entries, hidden.feedback_NH, self._kv)
            ids_target_B = choose_round_drafts(head, hidden.head_rows, requests, draft_index=j)

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Run the draft on every row of a verify; see `RoundDraft`.

        Sync: none.
        """
        self._entries.observe_round(requests, states)
        if self._dynamic_rows is not None:
            self._dynamic_rows.follow_round(requests, states)

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Run the draft on every row; see `PrefillDraft`.

        Sync: none.
        """
        self._entries.observe_rows(slots_B, states)

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Note that requests were prefilled; see `PrefillProposer`."""
        self._entries.start(views)
        if self._dynamic_rows is not None:
            self._dynamic_rows.follow(views)

    def last_length(self, num_drafts: int) -> int | None:
        """Return the most known tokens with which the draft's context holds that many drafts."""
        return self._model.max_positions - num_drafts if num_drafts else None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; its draft KV goes with its blocks."""
        self._entries.release(slot)
        if self._dynamic_rows is not None:
            self._dynamic_rows.release(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """What the newest entry gave. Own ids of dynamic rows follow from the tokens."""
        return self._entries.slot_state

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of what the newest entry of a slot gave."""
        return self._entries.export_slot(slot)

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after an entry that was run elsewhere."""
        self._entries.import_slot(view, state)
        if self._dynamic_rows is not None:
            self._dynamic_rows.follow([view])

    def _head(self, slots_M: torch.Tensor) -> DraftHead:
        """Return the head for rows of these slots."""
        if self._dynamic_rows is None:
            return self._model
        return self._dynamic_rows.head(slots_M)

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        """Return host integers as an int64 index on the device."""
        return on_device(values, device=self._device)
