"""Parallel drafting (P-EAGLE): all drafts of a round in one forward, none of which feeds another.

A request with newest token at L has run entry L - 1, which proposes the first draft. Drafts 1, 2,
... come from rows at L, L + 1, ... that embed the mask token beside the mask's state and see all
entries and the mask rows before them. What these rows write is overwritten: the entries of the
positions that a verify commits are run with the target's states, later ones again in the next
round.

Legend: B views, G drafts, N rows, H draft hidden.
*Source:* "P-EAGLE" (Amazon, 2026); Speculators 0.9 `peagle`, whose rollouts these rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.kv import KVLayer
from runtime.models import PEagleModel
from runtime.spec.draft_choice import DraftLaws, choose_drafts, choose_round_drafts
from runtime.spec.entries import Entries
from runtime.spec.packing import Row, pack_rows
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor


class ParallelProposer:
    """Runs a P-EAGLE draft; its only state is each slot's last entry."""

    needs_final_hidden = False
    num_lookahead_tokens = 1

    def __init__(
        self, model: PEagleModel, kv: Sequence[KVLayer], *, kv_block_size: int, num_slots: int
    ) -> None:
        """Run `model` over its own cache layers.

        Args:
            model: the draft.
            kv: its layers of the shared pool, addressed by the requests' block tables.
            kv_block_size: tokens of a KV block.
            num_slots: rows of the per-slot state, one for padding included.
        """
        self.name: str = model.facts.algorithm
        self.aux_layer_ids = model.facts.aux_layer_ids or ()
        self._model = model
        self._kv = tuple(kv)
        self._kv_block_size = kv_block_size
        self._device = model.embedding_VH.device
        self._entries = Entries(model, kv, num_slots=num_slots)

    def max_drafts(self, view: RequestView) -> int:
        """Return the drafts whose absolute positions the draft's context still holds."""
        return max(0, min(view.num_drafts, self._model.max_positions - len(view.ids_target)))

    def observe(self, observation: Observation) -> None:
        """Run the draft on every row: the token at p + 1 with the target's state at p.

        Sync: none.
        """
        self._entries.observe(observation)

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Draft all tokens of every view in one forward.

        Sync: none.
        """
        num_drafts = tuple(self.max_drafts(view) for view in views)
        depth = max(num_drafts, default=0)
        ids_target_BG = torch.zeros((len(views), depth), dtype=torch.int64, device=self._device)
        active = [b for b, count in enumerate(num_drafts) if count]
        if not active:
            return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts)
        self._entries.assert_started([views[b] for b in active])
        newest = self._entries.newest(self._index([views[b].slot for b in active]))
        head_input_NH = torch.cat(
            (newest.head_input_NH, self._masked([(b, num_drafts[b]) for b in active], views))
        )
        first_rows = [len(active)]  # of each active view's mask rows
        for b in active:
            first_rows.append(first_rows[-1] + num_drafts[b] - 1)
        laws = DraftLaws(self._model, views, num_drafts=depth)
        for j in range(depth):
            staying = [n for n, b in enumerate(active) if num_drafts[b] > j]
            rows = [first_rows[n] + j - 1 if j else n for n in staying]
            index = self._index([active[n] for n in staying])
            ids_target_BG[index, j] = choose_drafts(
                self._model,
                head_input_NH[self._index(rows)],
                [views[active[n]] for n in staying],
                draft_index=j,
                laws=laws,
            )
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts, q=laws.law())

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft all tokens of every request in one forward; see `RoundDraft`.

        Sync: none.
        """
        slots_B = requests.slots_B
        num_requests, num_drafts = requests.drafts_BG.shape
        if num_drafts == 0:
            return
        head_input_BGH = self._entries.newest(slots_B).head_input_NH[:, None]
        if num_drafts > 1:
            ids_BG = slots_B.new_full((num_requests, num_drafts - 1), self._model.mask_id_target)
            masked = self._model.forward_masked(requests.batch(ids_BG), self._kv).head_input_NH
            masked_BGH = masked.view(num_requests, num_drafts - 1, -1)
            head_input_BGH = torch.cat((head_input_BGH, masked_BGH), dim=1)
        if requests.sampling is None:
            ids_target_N = self._model.propose_ids(head_input_BGH.flatten(0, 1))
            requests.drafts_BG.copy_(ids_target_N.view(num_requests, num_drafts))
            return
        for j in range(num_drafts):
            choose_round_drafts(
                self._model, head_input_BGH[:, j].contiguous(), requests, draft_index=j
            )

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Run the draft on every row of a verify; see `RoundDraft`.

        Sync: none.
        """
        self._entries.observe_round(requests, states)

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Run the draft on every row; see `PrefillDraft`.

        Sync: none.
        """
        self._entries.observe_rows(slots_B, states)

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Note that requests were prefilled; see `PrefillProposer`."""
        self._entries.start(views)

    def last_length(self, num_drafts: int) -> int | None:
        """Return the most known tokens with which the draft's context holds that many drafts."""
        return self._model.max_positions - num_drafts if num_drafts else None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; its draft KV goes with its blocks."""
        self._entries.release(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """What the newest entry gave."""
        return self._entries.slot_state

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of what the newest entry of a slot gave."""
        return self._entries.export_slot(slot)

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after an entry that was run elsewhere."""
        self._entries.import_slot(view, state)

    def _masked(
        self, counts: Sequence[tuple[int, int]], views: Sequence[RequestView]
    ) -> torch.Tensor:
        """Return what the heads of all mask rows read, [sum of count - 1, H], view by view.

        Args:
            counts: (view, its drafts).
            views: the requests.
        """
        rows = [
            Row(b, len(views[b].ids_target) - 2 + d, self._model.mask_id_target)
            for b, count in counts
            for d in range(1, count)
        ]
        if not rows:
            return self._model.embedding_VH.new_zeros((0, self._model.embedding_VH.shape[1]))
        batch = pack_rows(rows, views, kv_block_size=self._kv_block_size, device=self._device)
        return self._model.forward_masked(batch, self._kv).head_input_NH

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        """Return host integers as an int64 index on the device."""
        return on_device(values, device=self._device)
