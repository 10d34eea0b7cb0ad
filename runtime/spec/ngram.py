"""Prompt lookup: propose what followed the last time the newest tokens occurred.

The longest suffix of the request's tokens, at most `max_ngram` long, that occurs earlier wins;
among equal lengths the most recent occurrence. No weights.

`NgramProposer` works on the host and keeps nothing. `DeviceNgramProposer` keeps each request's
tokens in its slot, for rounds without host reads; a request may have fewer drafts there than the
round has room for, or none, and says how many. Eagerly it is the other one.

Legend: S slots, the last one for padding; P positions, B requests, G drafts.

*Source:* Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.kernels.ngram import append_history, find_drafts
from runtime.spec.host import pad_proposal
from runtime.spec.script_table import Room
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor

DEFAULT_MAX_NGRAM = 4
_ALIGNMENT = 16  # tokens; rows then begin where a kernel may read four at once


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


class DeviceNgramProposer:
    """The same drafts, and a form of them for rounds on the device.

    Attributes:
        num_found_S: int64, drafts that the newest round of a slot has.
    """

    name = "ngram"
    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False
    num_lookahead_tokens = 0

    def __init__(
        self, room: Room, *, device: torch.device, max_ngram: int = DEFAULT_MAX_NGRAM
    ) -> None:
        """Compare suffixes of at most `max_ngram` tokens; tokens of all slots are kept on `device`.

        Args:
            room: tokens of a slot that are kept: one more than a request may have, because the
                last row of a round chooses a token behind the end.
            device: of proposals and tokens.
            max_ngram: as in `lookup`.
        """
        self._host = NgramProposer(device=device, max_ngram=max_ngram)
        self._device = device
        self._max_ngram = max_ngram
        num_positions = -(-(room.max_length + 1) // _ALIGNMENT) * _ALIGNMENT
        self._history_SP = torch.zeros(
            (room.num_slots, num_positions), dtype=torch.int32, device=device
        )
        self.num_found_S = torch.zeros(room.num_slots, dtype=torch.int64, device=device)
        self._num_written: dict[int, int] = {}  # slot -> tokens that the host wrote

    def max_drafts(self, view: RequestView) -> int:
        """Return what is wanted: lookup has no position limit."""
        return view.num_drafts

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Look the suffix of every request up in its own tokens, on the host."""
        return self._host.propose(views)

    def observe(self, observation: Observation) -> None:
        """Write down the tokens that came.

        Sync: none.
        """
        self._write(observation.views)

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft what is found, 0 beyond it; see `RoundDraft`.

        Sync: none.
        """
        num_drafts = requests.drafts_BG.shape[1]
        if num_drafts == 0:
            return
        found_BG = find_drafts(
            self._history_SP,
            requests.slots_B,
            requests.lengths_B,
            found_S=self.num_found_S,
            num_drafts=num_drafts,
            max_ngram=self._max_ngram,
        )
        requests.drafts_BG.copy_(found_BG)

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Write the tokens behind each row down; those that are not final are written again.

        Sync: none.
        """
        next_ids_BW = requests.per_request(states.next_ids_target_N)
        append_history(self._history_SP, requests.slots_B, requests.lengths_B, next_ids_BW)

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Nothing to learn: the host knows the prompt."""

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Write the requests' tokens down; see `PrefillProposer`.

        Sync: none.
        """
        self._write(views)

    def last_length(self, num_drafts: int) -> int | None:
        """Return None: lookup has no position limit."""
        return None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._num_written.pop(slot, None)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """Nothing: drafts follow from the request's tokens."""
        return ()

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Write the request's tokens down."""
        self._write([view])

    def _write(self, views: Sequence[RequestView]) -> None:
        """Write what is not known to be there; rounds on the device wrote the same in between.

        Sync: none.
        """
        num_positions = self._history_SP.shape[1]
        cells: list[int] = []
        ids_target: list[int] = []
        for view in views:
            first, end = self._num_written.get(view.slot, 0), len(view.ids_target)
            cells += range(view.slot * num_positions + first, view.slot * num_positions + end)
            ids_target += view.ids_target[first:end]
            self._num_written[view.slot] = end
        if cells:
            table = on_device([cells, ids_target], device=self._device)
            self._history_SP.view(-1).index_copy_(0, table[0], table[1].to(torch.int32))
