"""Drafting with several prediction layers: layer k makes draft k, each over keys of its own.

Entry p of layer k pairs the token at p + 1 + k with the output of layer k - 1 at p (of layer 0: the
target's state at p) and proposes the token at p + 2 + k. With newest token at L, layer k's entries
are final up to L - 1 - k: those after it need tokens that are not known. So `observe` runs layer k
on its rows shifted by k positions, and `propose` runs it on the k entries L - k..L - 1 with drafts
for the unknown tokens; their keys and values are written again once the tokens are committed.
Per slot and layer the output of the last final entry is kept, because the entry after it in the
next layer starts from it.

Legend: B views, G drafts, N rows, S slots, K layers, H hidden size.
*Source:* DeepSeek-V3 report, section 2.2: module k at position i reads the token at i + k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from runtime.batch import PreparedBatch, RoundRequests, RoundStates, on_device
from runtime.kv import KVLayer
from runtime.models import MtpModel
from runtime.spec.draft_choice import DraftLaws, choose_drafts
from runtime.spec.mtp_round import LayeredRound, LayerState
from runtime.spec.packing import Place, pack_block_tables, pack_places
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor


class LayeredMtpProposer:
    """Runs prediction layers of which each makes one draft of a round."""

    name = "mtp"
    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = True

    def __init__(
        self, model: MtpModel, kv: Sequence[KVLayer], *, kv_block_size: int, num_slots: int
    ) -> None:
        """Run `model` over its own cache layers.

        Args:
            model: two layers or more.
            kv: one cache layer each, addressed by the requests' block tables.
            kv_block_size: tokens of a KV block.
            num_slots: rows of the per-slot state: requests that may run at once, and one for
                padding where rounds run on the device.
        """
        num_layers = len(model.layers)
        self.num_lookahead_tokens = num_layers
        self._model = model
        self._kv = tuple(kv)
        self._kv_block_size = kv_block_size
        self._device = model.embedding_VH.device
        state = LayerState.empty(
            num_layers=num_layers,
            num_slots=num_slots,
            hidden_size=model.facts.decoder.hidden_size,
            like=model.embedding_VH,
        )
        self._kept_KSH, self._head_input_SH = state.kept_KSH, state.head_input_SH
        self._first_positions_S = state.first_positions_S
        self._round = LayeredRound(
            model=model, kv=self._kv, state=state, kv_block_size=kv_block_size
        )
        self._begun: set[int] = set()
        self._started: set[int] = set()

    def max_drafts(self, view: RequestView) -> int:
        """Return one draft for each layer at most, within the context of the layers."""
        room = self._model.max_positions - len(view.ids_target)
        return max(0, min(view.num_drafts, len(self._model.layers), room))

    def observe(self, observation: Observation) -> None:
        """Run every layer on the entries that the rows made final.

        Sync: none.
        """
        batch, state_NH = observation.batch, observation.final_hidden_NH
        assert state_NH is not None, "mtp needs the target states that it asked for"
        if batch.num_rows == 0:
            return
        spans = _Spans(observation, self._device)
        self._note_first_positions(observation, spans)
        entries = replace(batch, ids_target_N=observation.next_ids_target_N)
        for index in range(len(self._model.layers)):
            if index:
                entries = self._shifted(batch, observation.next_ids_target_N, spans, index)
            hidden = self._model.forward_layer(index, entries, state_NH, self._kv)
            if index == 0:
                spans.keep(hidden.head_input_NH, self._head_input_SH)
            state_NH = spans.after_previous(hidden.feedback_NH, self._kept_KSH[index])
            spans.keep(hidden.feedback_NH, self._kept_KSH[index])
        last_rows = zip(observation.views, observation.last_row, strict=True)
        self._started.update(view.slot for view, row in last_rows if row >= 0)

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Draft one token with each layer; views that want fewer drafts leave earlier.

        Sync: none.
        """
        num_drafts = tuple(self.max_drafts(view) for view in views)
        depth = max(num_drafts, default=0)
        ids_target_BG = torch.zeros((len(views), depth), dtype=torch.int64, device=self._device)
        missing = [
            view.request_id
            for view, count in zip(views, num_drafts, strict=True)
            if count and view.slot not in self._started
        ]
        assert not missing, f"no target state was observed for requests {missing}"
        block_tables_BT = pack_block_tables(views, device=self._device)
        rows_of: dict[int, list[int]] = {}  # view -> its rows in `state_NH`
        state_NH = self._kept_KSH.new_zeros((0, self._kept_KSH.shape[2]))
        laws = DraftLaws(self._model, views, num_drafts=depth)
        for index in range(depth):
            active = [b for b, count in enumerate(num_drafts) if count > index]
            active_N = self._index(active)
            if index == 0:
                head_input_NH = self._head_input_SH[self._index([views[b].slot for b in active])]
            else:
                places, sources, cells = _entries(views, active, index, rows_of)
                slots = self._index([views[b].slot for b in active])
                known_NH = torch.cat((self._kept_KSH[index - 1][slots], state_NH))
                entries = pack_places(
                    places,
                    views,
                    ids_target_N=ids_target_BG[self._index(cells[0]), self._index(cells[1])],
                    block_tables_BT=block_tables_BT,
                    kv_block_size=self._kv_block_size,
                )
                hidden = self._model.forward_layer(
                    index, entries, known_NH[self._index(sources)], self._kv
                )
                rows_of = _rows_of(places)
                state_NH = hidden.feedback_NH
                ends = self._index([rows_of[b][-1] for b in active])
                head_input_NH = hidden.head_input_NH[ends]
            ids_target_BG[active_N, index] = choose_drafts(
                self._model,
                head_input_NH,
                [views[b] for b in active],
                draft_index=index,
                laws=laws,
            )
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts, q=laws.law())

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft with one layer after the other; see `RoundDraft`.

        Sync: none.
        """
        self._round.draft(requests)

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Run every layer on every row of a verify; see `RoundDraft`.

        Sync: none.
        """
        self._round.observe(requests, states)

    def last_length(self, num_drafts: int) -> int | None:
        """Return the most known tokens with which the layers' context holds that many drafts."""
        return self._model.max_positions - num_drafts if num_drafts else None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; its draft KV goes with its blocks."""
        self._begun.discard(slot)
        self._started.discard(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """The output of each layer's last final entry, the head's input, where own rows begin."""
        num_layers, _, width = self._kept_KSH.shape
        dtype = self._kept_KSH.dtype
        return (
            SlotTensor(name="kept", shape=(num_layers, width), dtype=dtype),
            SlotTensor(name="head_input", shape=(width,), dtype=dtype),
            SlotTensor(name="first_position", shape=(), dtype=torch.int64),
        )

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of the layers' state of a slot."""
        return {
            "kept": self._kept_KSH[:, slot].clone(),
            "head_input": self._head_input_SH[slot].clone(),
            "first_position": self._first_positions_S[slot].clone(),
        }

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after entries that were run elsewhere."""
        self._kept_KSH[:, view.slot] = state["kept"]
        self._head_input_SH[view.slot] = state["head_input"]
        self._first_positions_S[view.slot] = state["first_position"]
        self._begun.add(view.slot)
        self._started.add(view.slot)

    def _note_first_positions(self, observation: Observation, spans: _Spans) -> None:
        """Keep where each new request's own rows begin: what is before is a cached prefix."""
        is_new_B = on_device(
            [view.slot not in self._begun for view in observation.views],
            dtype=torch.bool,
            device=self._device,
        )
        known_B = self._first_positions_S[spans.slots_B]
        first_B = observation.batch.positions_N[spans.first_rows_B]
        self._first_positions_S.index_copy_(
            0, spans.slots_B, torch.where(is_new_B, first_B, known_B)
        )
        self._begun.update(view.slot for view in observation.views)

    def _shifted(
        self, batch: PreparedBatch, ids_target_N: torch.Tensor, spans: _Spans, index: int
    ) -> PreparedBatch:
        """Return the rows `index` positions back; those before the request's first write nowhere.

        A cached prefix holds the keys of its own entries already, for every layer.
        """
        positions_N = batch.positions_N - index
        is_own_N = positions_N >= self._first_positions_S[spans.slots_N]
        positions_N = positions_N.clamp(min=0)
        block_N = batch.block_tables_BT[
            spans.views_N, torch.div(positions_N, self._kv_block_size, rounding_mode="floor")
        ]
        slots_N = block_N * self._kv_block_size + positions_N % self._kv_block_size
        return replace(
            batch,
            ids_target_N=ids_target_N,
            positions_N=positions_N,
            slots_N=torch.where(is_own_N, slots_N, 0),
        )

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        """Return host integers as an int64 index on the device."""
        return on_device(values, device=self._device)


class _Spans:
    """Which rows of an observation belong to which view, on the device.

    `first_rows_B` and `last_rows_B` are clamped; `has_rows_B` tells views without rows.
    """

    def __init__(self, observation: Observation, device: torch.device) -> None:
        batch = observation.batch
        order_B = torch.arange(len(observation.views), dtype=torch.int32, device=device)
        first_B = torch.searchsorted(batch.row_request_N, order_B)
        end_B = torch.searchsorted(batch.row_request_N, order_B, right=True)
        self.has_rows_B = end_B > first_B
        self.first_rows_B = first_B.clamp(max=batch.num_rows - 1)
        self.last_rows_B = (end_B - 1).clamp(min=0)
        self.slots_B = on_device([view.slot for view in observation.views], device=device)
        self.views_N = batch.row_request_N.long()
        self.slots_N = self.slots_B[self.views_N]
        row_N = torch.arange(batch.num_rows, device=device)
        self.is_first_N = row_N == self.first_rows_B[self.views_N]

    def after_previous(self, output_NH: torch.Tensor, kept_SH: torch.Tensor) -> torch.Tensor:
        """Return for each row the output of the row before it, the kept one for a first row."""
        return torch.where(self.is_first_N[:, None], kept_SH[self.slots_N], output_NH.roll(1, 0))

    def keep(self, output_NH: torch.Tensor, kept_SH: torch.Tensor) -> None:
        """Store each view's last row in its slot."""
        last_BH = torch.where(
            self.has_rows_B[:, None], output_NH[self.last_rows_B], kept_SH[self.slots_B]
        )
        kept_SH.index_copy_(0, self.slots_B, last_BH)


def _entries(
    views: Sequence[RequestView], active: Sequence[int], index: int, rows_of: dict[int, list[int]]
) -> tuple[list[Place], list[int], tuple[list[int], list[int]]]:
    """Return the entries of layer `index` that need drafts, for each active view.

    Args:
        views: all views.
        active: those that draft with this layer.
        index: of the layer, 1 or more.
        rows_of: view -> rows of the layer before, for positions up to L - 1.

    Returns:
        Places; rows of (kept states of the active views, then the layer before) that hold the
        states; view and draft of the tokens.
    """
    places: list[Place] = []
    sources: list[int] = []
    cells: tuple[list[int], list[int]] = ([], [])
    for order, b in enumerate(active):
        newest = len(views[b].ids_target) - 1
        before = [len(active) + row for row in rows_of.get(b, [])]
        if newest >= index:
            before = [order, *before]
        for place, source in enumerate(before):
            position = newest - len(before) + place
            places.append(Place(b, position))
            sources.append(source)
            cells[0].append(b)
            cells[1].append(position + index - newest)
    return places, sources, cells


def _rows_of(places: Sequence[Place]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, place in enumerate(places):
        rows.setdefault(place.view_index, []).append(row)
    return rows
