"""Several prediction layers inside a round without host reads: `LayeredMtpProposer` on the device.

With newest token at L, layer k drafts over the k entries L - k..L - 1, whose tokens are the drafts
so far, and `observe` runs it on the verified rows, k positions back. Entries before a request's own
first row (before position 0, too) are computed and ignored: they write to block 0 and feed entries
before that row only. Entries that need a rejected token are written again in the next round.

Legend: B requests, G drafts, N verified rows, S slots, the last one for padding; K layers, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch, RoundRequests, RoundStates, packed
from runtime.kernels import keep_rows, take_rows
from runtime.kv import KVLayer
from runtime.models import MtpModel
from runtime.spec.draft_choice import choose_round_drafts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerState:
    """Per-slot state of the layers, advanced in place.

    Args:
        kept_KSH: output of each layer's last final entry.
        head_input_SH: what the head reads of layer 0's last final entry.
        first_positions_S: int64, where a request's own rows begin; what is before is a prefix that
            another request computed.
    """

    kept_KSH: torch.Tensor
    head_input_SH: torch.Tensor
    first_positions_S: torch.Tensor

    @classmethod
    def empty(
        cls, *, num_layers: int, num_slots: int, hidden_size: int, like: torch.Tensor
    ) -> LayerState:
        """Return the state of slots without requests, in the dtype and on the device of `like`."""
        kept_KSH = like.new_zeros((num_layers, num_slots, hidden_size))
        return cls(
            kept_KSH=kept_KSH,
            head_input_SH=torch.zeros_like(kept_KSH[0]),
            first_positions_S=torch.zeros(num_slots, dtype=torch.int64, device=like.device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayeredRound:
    """What a round of several prediction layers runs on."""

    model: MtpModel
    kv: Sequence[KVLayer]
    state: LayerState
    kv_block_size: int

    def draft(self, requests: RoundRequests) -> None:
        """Draft into `requests.drafts_BG`, at most one token for each layer.

        Sync: none.
        """
        model, state, slots_B = self.model, self.state, requests.slots_B
        drafts_BG = requests.drafts_BG
        num_requests, num_drafts = drafts_BG.shape
        assert num_drafts <= len(model.layers), "a layer makes one draft"
        if num_drafts == 0:
            return
        head_input_BH = take_rows(state.head_input_SH, slots_B)
        choose_round_drafts(model, head_input_BH, requests, draft_index=0)
        state_BCH = state.head_input_SH.new_zeros((num_requests, 0, state.head_input_SH.shape[1]))
        row_request_B = requests.row_request_BW[:, :1]
        for index in range(1, num_drafts):
            kept_BH = take_rows(state.kept_KSH[index - 1], slots_B)
            known_BCH = torch.cat((kept_BH[:, None], state_BCH), dim=1)
            back_C = torch.arange(-index, 0, device=slots_B.device)
            entries = self._entries(
                requests,
                ids_target_N=packed(drafts_BG[:, :index]),
                positions_N=packed(requests.lengths_B[:, None] + back_C),
                row_request_N=packed(row_request_B.expand(num_requests, index)),
                block_tables_BT=requests.block_tables_BT,
            )
            hidden = model.forward_layer(index, entries, known_BCH.flatten(0, 1), self.kv)
            state_BCH = hidden.feedback_NH.view(known_BCH.shape)
            heads_BCH = hidden.head_input_NH.view(known_BCH.shape)
            head_input_BH = heads_BCH[:, -1].contiguous()
            choose_round_drafts(model, head_input_BH, requests, draft_index=index)

    def observe(self, requests: RoundRequests, states: RoundStates) -> None:
        """Run every layer on the verified rows and keep what the last final ones give.

        Sync: none.
        """
        batch, state_NH = states.batch, states.final_hidden_ND
        assert state_NH is not None, "prediction layers need the states they asked for"
        slots_B, last_rows_B = requests.slots_B, states.last_rows_B
        slots_N = self._slots_with_padding(requests)[batch.row_request_N.long()]
        newest_N = torch.cat((requests.lengths_B, requests.lengths_B[:1] * 0))
        is_first_N = batch.positions_N == newest_N[batch.row_request_N.long()]
        for index in range(len(self.model.layers)):
            entries = self._entries(
                requests,
                ids_target_N=states.next_ids_target_N,
                positions_N=batch.positions_N - index,
                row_request_N=batch.row_request_N,
                block_tables_BT=batch.block_tables_BT,
            )
            hidden = self.model.forward_layer(index, entries, state_NH, self.kv)
            kept_SH = self.state.kept_KSH[index]
            if index == 0:
                keep_rows(hidden.head_input_NH, last_rows_B, self.state.head_input_SH, slots_B)
            before_NH = hidden.feedback_NH.roll(1, 0)
            state_NH = torch.where(is_first_N[:, None], kept_SH.index_select(0, slots_N), before_NH)
            keep_rows(hidden.feedback_NH, last_rows_B, kept_SH, slots_B)

    def _slots_with_padding(self, requests: RoundRequests) -> torch.Tensor:
        """Return the requests' slots and, at the index of padding rows, the padding slot."""
        num_slots = self.state.head_input_SH.shape[0]
        return torch.cat((requests.slots_B, requests.slots_B.new_full((1,), num_slots - 1)))

    def _entries(
        self,
        requests: RoundRequests,
        *,
        ids_target_N: torch.Tensor,
        positions_N: torch.Tensor,
        row_request_N: torch.Tensor,
        block_tables_BT: torch.Tensor,
    ) -> PreparedBatch:
        """Return rows at any positions; those before a request's own first one write to block 0."""
        size, views_N = self.kv_block_size, row_request_N.long()
        first_N = self.state.first_positions_S[self._slots_with_padding(requests)[views_N]]
        is_own_N = positions_N >= first_N
        positions_N = positions_N.clamp(min=0)
        block_N = block_tables_BT[views_N, positions_N // size]
        return PreparedBatch(
            ids_target_N=ids_target_N,
            positions_N=positions_N,
            slots_N=torch.where(is_own_N, block_N * size + positions_N % size, 0),
            row_request_N=row_request_N,
            block_tables_BT=block_tables_BT,
            max_length=requests.max_length,
        )
