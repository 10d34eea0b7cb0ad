"""Block drafting (DFlash, DFlash2, DSpark): one draft forward fills a block; heads read it in turn.

A request with newest token at L (KV known for 0..L - 1) gives the draft the slots [anchor, mask,
...] at positions L, L + 1, ...; the anchor is the newest token. Slot k predicts the token at
L + k + 1 (`sample_from_anchor`), or slot k > 0 the one at L + k and slot 0 nothing. So g drafts
take g or g + 1 slots (draft width), and the target verifies g + 1 rows in either case.

`observe` writes the draft's keys and values of final positions, so that they never hold a block's
own. A Markov head corrects a slot's logits by the token before its prediction, which is a target
id: drafts are mapped before they are stored or fed to the next slot. Slot 0 advances a recurrent
Markov state even when it predicts nothing, as in training.

Legend: B views, G drafts, N slots, M predicting slots, S request slots, H draft hidden, R draft
vocabulary.
*Source:* arXiv 2602.06036 (DFlash), 2607.05147 (DSpark).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.kernels import HeadRows, logits_argmax, plain_rows
from runtime.kernels.block_rows import keep_chances
from runtime.kv import KVLayer
from runtime.models import BlockModel, BlockRows
from runtime.spec.block_round import block_states, read_block
from runtime.spec.draft_choice import DraftLaws, choose_drafts
from runtime.spec.packing import Row, pack_rows
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chooser:
    """A `DraftHead` whose input is finished logits over draft ids."""

    draft_to_target_R: torch.Tensor

    def logits(self, head_input_MH: HeadRows) -> torch.Tensor:
        """Return the input."""
        return plain_rows(head_input_MH)

    def propose_ids(
        self, head_input_MH: HeadRows, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int64 target ids [M]: the highest logit, the lowest draft id on a tie."""
        return logits_argmax(
            plain_rows(head_input_MH), names_V=self.draft_to_target_R, copy_M=copy_M
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    """Blocks of one draft forward.

    Args:
        rows: their slots.
        first_rows: per block, row of its slot 0.
        num_drafts: per block, how many drafts it yields, 1 or more.
        views: the requests.
    """

    rows: BlockRows
    first_rows: tuple[int, ...]
    num_drafts: tuple[int, ...]
    views: tuple[RequestView, ...]


class BlockProposer:
    """Runs a block draft; between rounds it keeps the last confidences and nothing else."""

    num_lookahead_tokens = 0
    needs_final_hidden = False

    def __init__(
        self, model: BlockModel, kv: Sequence[KVLayer], *, kv_block_size: int, num_slots: int
    ) -> None:
        """Run `model` over its own cache layers.

        Args:
            model: the draft.
            kv: its layers of the shared pool, addressed by the requests' block tables.
            kv_block_size: tokens of a KV block.
            num_slots: rows of the per-slot state: requests that may run at once, and one for
                padding where rounds run on the device.
        """
        aux_layer_ids = model.facts.aux_layer_ids
        assert aux_layer_ids is not None, "the manifest of a block draft lists its aux layers"
        self.name: str = model.facts.algorithm
        self.aux_layer_ids = aux_layer_ids
        self._model = model
        self._kv = tuple(kv)
        self._kv_block_size = kv_block_size
        self._device = model.embedding_VH.device
        self._chooser = _Chooser(draft_to_target_R=model.draft_to_target_R)
        self.confidence_SG = torch.ones(
            (num_slots, model.max_drafts), dtype=torch.float32, device=self._device
        )
        """Chance of each draft of a slot's newest round, given those before; 1 where unknown."""

    @property
    def has_confidence(self) -> bool:
        """Whether the draft has a confidence head."""
        return self._model.confidence is not None

    def max_drafts(self, view: RequestView) -> int:
        """Return the drafts that a block yields and whose positions the draft's context holds."""
        room = self._model.max_positions - len(view.ids_target)
        return max(0, min(view.num_drafts, self._model.max_drafts, room))

    def observe(self, observation: Observation) -> None:
        """Write the draft's keys and values of the rows' positions.

        Sync: none.
        """
        batch, states = observation.batch, observation.aux_hidden_N
        assert states is not None, f"{self.name} needs the states that `aux_layer_ids` names"
        if batch.num_rows:
            self._model.write_context(batch, states, self._kv)

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Draft a block for every view; its width follows from how many drafts the view gets.

        Sync: none.
        """
        num_drafts = tuple(self.max_drafts(view) for view in views)
        depth = max(num_drafts, default=0)
        ids_target_BG = torch.zeros((len(views), depth), dtype=torch.int64, device=self._device)
        active = [b for b, count in enumerate(num_drafts) if count]
        laws = DraftLaws(self._chooser, views, num_drafts=depth)
        if active:
            blocks = self._pack([views[b] for b in active], [num_drafts[b] for b in active])
            hidden_NH = self._model.forward(blocks.rows, self._kv)
            ids_target_BG[self._index(active)] = self._read(blocks, hidden_NH, laws)
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts, q=laws.law())

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft a block for every request; see `RoundDraft`.

        Sync: none.
        """
        num_drafts = requests.drafts_BG.shape[1]
        if num_drafts == 0:
            return
        hidden_BWH = block_states(self._model, self._kv, requests, num_drafts)
        odds_BG = read_block(self._model, self._chooser, hidden_BWH, requests)
        if odds_BG is not None:
            keep_chances(
                torch.sigmoid(odds_BG), requests.num_drafts_B, requests.slots_B, self.confidence_SG
            )

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Write the draft's keys and values of every row of a verify; see `RoundDraft`.

        Those beyond the accepted rows lie where the next block and `observe_round` write again.

        Sync: none.
        """
        self.observe_prefill(requests.slots_B, states)

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Write the draft's keys and values of every row; see `PrefillDraft`.

        Sync: none.
        """
        assert states.aux_hidden_NA is not None, f"{self.name} needs the states it asked for"
        self._model.write_context(states.batch, states.aux_hidden_NA, self._kv)

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Nothing is kept on the host; see `PrefillProposer`."""

    def last_length(self, num_drafts: int) -> int | None:
        """Return the most known tokens with which the draft's context holds that many drafts."""
        return self._model.max_positions - num_drafts if num_drafts else None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; its draft KV goes with its blocks."""
        self.confidence_SG[slot] = 1.0

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """Nothing: drafts follow from KV and tokens; before a round there is no confidence."""
        return ()

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take over."""

    def _pack(self, views: Sequence[RequestView], num_drafts: Sequence[int]) -> _Blocks:
        """Lay the slots of all blocks out, one block after the other."""
        rows: list[Row] = []
        anchors: list[int] = []
        ends: list[int] = []
        first_rows: list[int] = []
        for n, (view, count) in enumerate(zip(views, num_drafts, strict=True)):
            anchor, width = len(view.ids_target) - 1, count + self._model.first_slot
            first_rows.append(len(rows))
            rows.append(Row(n, anchor, view.ids_target[-1]))
            rows.extend(Row(n, anchor + k, self._model.mask_id_target) for k in range(1, width))
            anchors.extend([anchor] * width)
            ends.extend([anchor + width - 1] * width)
        batch = pack_rows(rows, views, kv_block_size=self._kv_block_size, device=self._device)
        return _Blocks(
            rows=BlockRows(batch=batch, anchors_N=self._index(anchors), ends_N=self._index(ends)),
            first_rows=tuple(first_rows),
            num_drafts=tuple(num_drafts),
            views=tuple(views),
        )

    def _read(self, blocks: _Blocks, hidden_NH: torch.Tensor, laws: DraftLaws) -> torch.Tensor:
        """Return int64 target ids [B, G], 0 beyond a view's drafts: the heads, slot by slot."""
        model, count = self._model, len(blocks.views)
        depth = max(blocks.num_drafts)
        ids_target_BG = torch.zeros((count, depth), dtype=torch.int64, device=self._device)
        first_B = self._index(blocks.first_rows)
        previous_B = self._index([view.ids_target[-1] for view in blocks.views])
        state_BM = None if model.markov is None else model.markov.initial_state(count)
        for k in range(model.first_slot + depth):
            j = k - model.first_slot
            staying = [n for n, drafts in enumerate(blocks.num_drafts) if drafts > j]
            index = self._index(staying)
            hidden_MH = hidden_NH[first_B[index] + k]
            logits_MR = None if j < 0 else model.base_logits(hidden_MH)
            before_MM = None
            if model.markov is not None and state_BM is not None:
                step = model.markov.step(previous_B[index], hidden_MH, state_BM[index])
                state_BM = state_BM.index_copy(0, index, step.state_BM)
                before_MM = step.previous_BM
                if logits_MR is not None:
                    logits_MR = logits_MR + model.markov.bias(step.features_BM)
            if logits_MR is None:
                continue
            logits_MR = model.select(logits_MR, previous_B[index], hidden_MH)
            views = [blocks.views[n] for n in staying]
            chosen_M = choose_drafts(self._chooser, logits_MR, views, draft_index=j, laws=laws)
            ids_target_BG[index, j] = chosen_M
            previous_B = previous_B.index_copy(0, index, chosen_M)
            if model.confidence is not None:
                slots = self._index([view.slot for view in views])
                odds_M = model.confidence.logits(hidden_MH, before_MM)
                self.confidence_SG[slots, j] = torch.sigmoid(odds_M)
        return ids_target_BG

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        """Return host integers as an int64 index on the device."""
        return on_device(values, device=self._device)
