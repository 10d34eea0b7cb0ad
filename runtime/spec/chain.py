"""Chain drafting: one draft token per step, each fed by the step before (EAGLE-3, EAGLE-1, MTP).

Entry p pairs the token at p + 1 with the target's state at p; it sits at position p, writes its KV
into the slot of position p and proposes the token at p + 2. `observe` runs the entries whose states
the target has computed, so the draft's KV of committed positions never holds a chain's own guess.
A request with newest token at L (KV known for 0..L - 1) starts a round at entry L - 1; chain entry
j pairs draft j with the feedback of the step before, at position L + j.

Drafts are mapped to target ids before they are stored or fed back. A sampled request drafts the
argmax of its filtered draft log weights plus the noise that the target will use for the same
position and ids: equal laws then give equal tokens.

Legend: B views, G drafts, N rows, M rows of sampled requests, S slots, H draft hidden, R draft
vocabulary.
*Source:* Li et al., "EAGLE" and "EAGLE-3" (arXiv 2401.15077, 2503.01840), alignment of entries as
in SafeAILab's code; DeepSeek-V3 report, section 2.2 (MTP), whose layer is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from runtime.batch import PreparedBatch, RoundRequests, RoundStates
from runtime.kv import KVLayer
from runtime.models import ChainDraft, DraftHidden
from runtime.spec.draft_choice import choose_drafts
from runtime.spec.host import on_device
from runtime.spec.packing import Place, pack_block_tables, pack_places
from runtime.spec.types import Observation, Proposal, RequestView


class ChainProposer:
    """Runs a draft that makes one token a step; its only state is each slot's last entry."""

    num_lookahead_tokens = 1

    def __init__(
        self, model: ChainDraft, kv: Sequence[KVLayer], *, kv_block_size: int, num_slots: int
    ) -> None:
        """Run `model` over its own cache layers.

        Args:
            model: the draft.
            kv: its layers of the shared pool, addressed by the requests' block tables.
            kv_block_size: tokens of a KV block.
            num_slots: rows of the per-slot state: requests that may run at once, and one for
                padding where rounds run on the device.
        """
        facts = model.facts
        self.name: str = facts.algorithm
        self.aux_layer_ids = facts.aux_layer_ids or ()
        self.needs_final_hidden = facts.aux_layer_ids is None
        self._model = model
        self._kv = tuple(kv)
        self._kv_block_size = kv_block_size
        self._device = model.embedding_VH.device
        shape = (num_slots, facts.decoder.hidden_size)
        self._feedback_SH = torch.zeros(shape, dtype=model.embedding_VH.dtype, device=self._device)
        self._head_input_SH = torch.zeros_like(self._feedback_SH)
        self._started: set[int] = set()

    def max_drafts(self, view: RequestView) -> int:
        """Return the drafts whose absolute positions the draft's context still holds."""
        return max(0, min(view.num_drafts, self._model.max_positions - len(view.ids_target)))

    def observe(self, observation: Observation) -> None:
        """Run the draft on every row: the token at p + 1 with the target's state at p.

        Sync: none.
        """
        batch = observation.batch
        states = (
            observation.final_hidden_NH if self.needs_final_hidden else observation.aux_hidden_N
        )
        assert states is not None, f"{self.name} needs the target states that it asked for"
        if batch.num_rows == 0:
            return
        entries = PreparedBatch(
            ids_target_N=observation.next_ids_target_N,
            positions_N=batch.positions_N,
            slots_N=batch.slots_N,
            row_request_N=batch.row_request_N,
            block_tables_BT=batch.block_tables_BT,
            max_length=batch.max_length,
        )
        hidden = self._model.forward(entries, self._model.fuse(states), self._kv)
        ends = [
            (view.slot, row)
            for view, row in zip(observation.views, observation.last_row, strict=True)
            if row >= 0
        ]
        if ends:
            last = hidden.rows(self._index([row for _, row in ends]))
            slots = self._index([slot for slot, _ in ends])
            self._feedback_SH[slots] = last.feedback_NH
            self._head_input_SH[slots] = last.head_input_NH
            self._started.update(slot for slot, _ in ends)

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
        missing = [views[b].request_id for b in active if views[b].slot not in self._started]
        assert not missing, f"no target state was observed for requests {missing}"
        slots = self._index([views[b].slot for b in active])
        hidden = DraftHidden(
            feedback_NH=self._feedback_SH[slots], head_input_NH=self._head_input_SH[slots]
        )
        block_tables_BT = pack_block_tables(views, device=self._device)
        active_N = self._index(active)
        for j in range(depth):
            ids_target_N = choose_drafts(
                self._model, hidden.head_input_NH, [views[b] for b in active], draft_index=j
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
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts)

    def draft_round(self, requests: RoundRequests, num_drafts: int) -> torch.Tensor:
        """Return int64 target ids [B, num_drafts]; see `RoundDraft`.

        Sync: none.
        """
        slots_B = requests.slots_B
        hidden = DraftHidden(
            feedback_NH=self._feedback_SH[slots_B], head_input_NH=self._head_input_SH[slots_B]
        )
        drafts: list[torch.Tensor] = []
        while len(drafts) < num_drafts:
            if drafts:
                entries = requests.batch(drafts[-1][:, None], first=len(drafts) - 1)
                hidden = self._model.forward(entries, hidden.feedback_NH, self._kv)
            drafts.append(self._model.propose_ids(hidden.head_input_NH))
        return torch.stack(drafts, dim=1) if drafts else slots_B.new_zeros((slots_B.shape[0], 0))

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Run the draft on every row of a verify; see `RoundDraft`.

        Entries beyond the accepted ones write keys and values that the next round writes again.

        Sync: none.
        """
        target_states = states.final_hidden_ND if self.needs_final_hidden else states.aux_hidden_NA
        assert target_states is not None, f"{self.name} needs the target states it asked for"
        entries = replace(states.batch, ids_target_N=states.next_ids_target_N)
        hidden = self._model.forward(entries, self._model.fuse(target_states), self._kv)
        last = hidden.rows(states.last_rows_B)
        self._feedback_SH.index_copy_(0, requests.slots_B, last.feedback_NH)
        self._head_input_SH.index_copy_(0, requests.slots_B, last.head_input_NH)

    def last_length(self, num_drafts: int) -> int | None:
        """Return the most known tokens with which the draft's context holds that many drafts."""
        return self._model.max_positions - num_drafts if num_drafts else None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; its draft KV goes with its blocks."""
        self._started.discard(slot)

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        """Return host integers as an int64 index on the device."""
        return on_device(values, device=self._device)
