"""The entries of drafts that read a token beside a state: their KV and the newest one's output.

Entry p pairs the token at p + 1 with the target's state at p; it sits at position p, writes its KV
into the slot of position p and proposes the token at p + 2. Entries are run when the target has
computed their states, so the draft's KV of committed positions never holds a round's own guess.
EAGLE-3, EAGLE-1, P-EAGLE and MTP of one layer keep the same state: each slot's last entry.

Legend: N rows, M rows picked by the caller, S slots, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.kernels import embed_stream, keep_rows, take_rows
from runtime.kv import KVLayer
from runtime.models import ChainDraft, DraftHidden
from runtime.spec.types import Observation, RequestView, SlotTensor


class Entries:
    """Runs final entries and keeps what the newest one of each slot gave."""

    def __init__(self, model: ChainDraft, kv: Sequence[KVLayer], *, num_slots: int) -> None:
        """Run `model` over its own cache layers.

        Args:
            model: the draft.
            kv: its layers of the shared pool.
            num_slots: rows of the per-slot state.
        """
        facts = model.facts
        self.needs_final_hidden = facts.aux_layer_ids is None
        self._name = facts.algorithm
        self._model = model
        self._kv = tuple(kv)
        self._device = model.embedding_VH.device
        shape = (num_slots, facts.decoder.hidden_size)
        self._feedback_SH = torch.zeros(shape, dtype=model.embedding_VH.dtype, device=self._device)
        self._is_shared = model.has_one_reading
        self._head_input_SH = (
            self._feedback_SH if self._is_shared else torch.zeros_like(self._feedback_SH)
        )
        self._started: set[int] = set()

    def observe(self, observation: Observation) -> None:
        """Run the draft on every row: the token at p + 1 with the target's state at p.

        Sync: none.
        """
        batch = observation.batch
        states = (
            observation.final_hidden_NH if self.needs_final_hidden else observation.aux_hidden_N
        )
        assert states is not None, f"{self._name} needs the target states that it asked for"
        if batch.num_rows == 0:
            return
        entries = replace(
            batch,
            ids_target_N=observation.next_ids_target_N,
            limits_N=None,
            window_positions_N=None,
            rows_per_request=None,
        )
        hidden = self._model.forward(entries, self._model.fuse(states), self._kv)
        ends = [
            (view.slot, row)
            for view, row in zip(observation.views, observation.last_row, strict=True)
            if row >= 0
        ]
        if ends:
            rows_M = on_device([row for _, row in ends], device=self._device)
            self._keep(on_device([slot for slot, _ in ends], device=self._device), hidden, rows_M)
            self._started.update(slot for slot, _ in ends)

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Run the draft on every row of a verify; see `RoundDraft`.

        Entries beyond the accepted ones write keys and values that the next round writes again.

        Sync: none.
        """
        self.observe_rows(requests.slots_B, states)

    def observe_rows(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Run the draft on every row and keep what the last final one of each request gives.

        Args:
            slots_B: int64, the requests' slots.
            states: of all rows.

        Sync: none.
        """
        target_states = states.final_hidden_ND if self.needs_final_hidden else states.aux_hidden_NA
        assert target_states is not None, f"{self._name} needs the target states it asked for"
        entries = replace(states.batch, ids_target_N=states.next_ids_target_N)
        hidden = self._model.forward(entries, self._model.fuse(target_states), self._kv)
        self._keep(slots_B, hidden, states.last_rows_B)

    def start(self, views: Sequence[RequestView]) -> None:
        """Note that entries of these requests were run on the device."""
        self._started.update(view.slot for view in views)

    def newest(self, slots_M: torch.Tensor) -> DraftHidden:
        """Return what the newest entries of these slots gave."""
        norm, stream = self._model.head_norm, None
        if norm is None:
            head_input_MH = take_rows(self._head_input_SH, slots_M)
        else:
            stream = embed_stream(slots_M, self._head_input_SH, norm.weight_D)
            head_input_MH = stream.residual_MD
        return DraftHidden(
            feedback_NH=head_input_MH if self._is_shared else take_rows(self._feedback_SH, slots_M),
            head_input_NH=head_input_MH,
            stream=stream,
        )

    def assert_started(self, views: Sequence[RequestView]) -> None:
        """Fail for a request of which no final state was observed."""
        missing = [view.request_id for view in views if view.slot not in self._started]
        assert not missing, f"no target state was observed for requests {missing}"

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; its draft KV goes with its blocks."""
        self._started.discard(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """What the newest entry gave: the next entry's state, and the input of the head.

        Both are of the draft's hidden size, whatever the target's states that were read; where they
        are one tensor it is named once.
        """
        shape, dtype = (self._feedback_SH.shape[1],), self._feedback_SH.dtype
        return tuple(SlotTensor(name=name, shape=shape, dtype=dtype) for name in self._kept())

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of what the newest entry of a slot gave."""
        return {name: kept_SH[slot].clone() for name, kept_SH in self._kept().items()}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after an entry that was run elsewhere."""
        for name, kept_SH in self._kept().items():
            kept_SH[view.slot] = state[name]
        self._started.add(view.slot)

    def _kept(self) -> dict[str, torch.Tensor]:
        both = {"feedback": self._feedback_SH, "head_input": self._head_input_SH}
        return {"feedback": self._feedback_SH} if self._is_shared else both

    def _keep(self, slots_M: torch.Tensor, hidden: DraftHidden, rows_M: torch.Tensor) -> None:
        keep_rows(hidden.feedback_NH, rows_M, self._feedback_SH, slots_M)
        if not self._is_shared:
            keep_rows(hidden.head_input_NH, rows_M, self._head_input_SH, slots_M)
