"""Scripted drafts: any acceptance pattern without weights.

A script knows the continuation of each prompt (the target's own answer, from a run without drafts)
and proposes it, changed where the script says so: at a per-position rate, so that a wanted accept
length can be served, or at one fixed draft per round, so that a test can force every count.
`OracleProposer` works on the host and is the readable twin of `DeviceOracleProposer`, which serves
rounds without host reads; verbatim drafts per round are for the host only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.spec.host import pad_proposal
from runtime.spec.noise import DrawKind, noise_words, uniform
from runtime.spec.script_table import (
    OracleScript,
    Room,
    ScriptKey,
    ScriptTable,
    draw_key,
    find,
    other_id,
    prompt_of,
)
from runtime.spec.types import Observation, Proposal, RequestView, SlotTensor

__all__ = ["DeviceOracleProposer", "OracleProposer", "OracleScript", "ScriptKey", "other_id"]


class OracleProposer:
    """Proposes what its script says; requests that the script does not know get no drafts."""

    name = "oracle"
    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False
    num_lookahead_tokens = 0

    def __init__(self, script: OracleScript, *, device: torch.device) -> None:
        """Follow `script`; proposals are made on `device`."""
        for key, rounds in script.rounds.items():
            assert all(rounds), f"the script for {key} has a round without drafts"
        self._script = script
        self._device = device
        self._rounds_done: dict[int, int] = {}

    def max_drafts(self, view: RequestView) -> int:
        """Return how many drafts the script has for this round of the request, at most the wish."""
        return len(self._drafts(view))

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Return each request's scripted drafts; a round counts when there are some."""
        drafts = [self._drafts(view) for view in views]
        for view, row in zip(views, drafts, strict=True):
            if row:
                self._rounds_done[view.slot] = self._rounds_done.get(view.slot, 0) + 1
        return pad_proposal(drafts, device=self._device)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def release(self, slot: int) -> None:
        """Forget how many rounds the request in `slot` had."""
        self._rounds_done.pop(slot, None)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """Nothing: drafts follow from the script."""
        return ()

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing to take over: no round has run."""

    def _drafts(self, view: RequestView) -> list[int]:
        """Return the drafts of the request's next round."""
        done = self._rounds_done.get(view.slot, 0)
        rounds = find(self._script.rounds, view)
        if rounds is not None:
            return list(rounds[done][: view.num_drafts]) if done < len(rounds) else []
        drafts = remaining(self._script, view)
        is_changed = self._changes(len(view.ids_target), len(drafts), prompt_of(view), done)
        return [
            other_id(draft) if changed else draft
            for draft, changed in zip(drafts, is_changed, strict=True)
        ]

    def _changes(
        self, first_position: int, num_drafts: int, prompt: tuple[int, ...], done: int
    ) -> list[bool]:
        """Tell for each draft of a round whether it is changed."""
        script = self._script
        if script.accept_counts:
            wrong = script.accept_counts[done % len(script.accept_counts)]
            return [j == wrong for j in range(num_drafts)]
        if not script.corruption_rates or num_drafts == 0:
            return [False] * num_drafts
        keys = [draw_key(script, prompt, first_position + j) for j in range(num_drafts)]
        lanes = torch.arange(num_drafts, dtype=torch.int64)
        draws = uniform(noise_words(keys, lanes, kind=DrawKind.ORACLE).diagonal()).tolist()
        rates = script.corruption_rates
        return [draw < rates[min(j, len(rates) - 1)] for j, draw in enumerate(draws)]


class DeviceOracleProposer:
    """The same drafts made on the device, from a table of what the script says."""

    name = "oracle"
    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False
    num_lookahead_tokens = 0

    def __init__(self, script: OracleScript, room: Room, *, device: torch.device) -> None:
        """Follow a script without verbatim rounds."""
        self._script = script
        self._device = device
        self._table = ScriptTable(script, room, device=device)

    def max_drafts(self, view: RequestView) -> int:
        """Return how many tokens the script has left for the request, at most the wish."""
        return len(remaining(self._script, view))

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Return each request's scripted drafts; a round counts when there are some.

        Sync: none.
        """
        num_drafts = tuple(self.max_drafts(view) for view in views)
        depth = max(num_drafts, default=0)
        ids_target_BG = torch.zeros((len(views), depth), dtype=torch.int64, device=self._device)
        active = [b for b, count in enumerate(num_drafts) if count]
        if not active:
            return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts)
        self._table.load([views[b] for b in active])
        counts_B = on_device([num_drafts[b] for b in active], device=self._device)
        drafts_BG = self._table.drafts(
            on_device([views[b].slot for b in active], device=self._device),
            on_device([len(views[b].ids_target) - 1 for b in active], device=self._device),
            None,
            depth,
        )
        is_draft_BG = torch.arange(depth, device=self._device) < counts_B[:, None]
        ids_target_BG[on_device(active, device=self._device)] = drafts_BG * is_draft_BG
        return Proposal(ids_target_BG=ids_target_BG, num_drafts=num_drafts)

    def observe(self, observation: Observation) -> None:
        """Write down what the script says about new requests.

        Sync: none.
        """
        self._table.load(observation.views)

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft what the script says; see `RoundDraft`.

        Sync: none.
        """
        drafts_BG = requests.drafts_BG
        if drafts_BG.shape[1]:
            drafts_BG.copy_(
                self._table.drafts(requests.slots_B, requests.lengths_B, None, drafts_BG.shape[1])
            )

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Nothing to learn."""

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Nothing to learn: the host knows the prompt."""

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Write down what the script says about the requests; see `PrefillProposer`.

        Sync: none.
        """
        self._table.load(views)

    def last_length(self, num_drafts: int) -> int | None:
        """Return None: a round beyond the end of a continuation proposes wrong ids."""
        return None

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._table.release(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """Nothing: drafts follow from the script."""
        return ()

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Write down what the script says about the request."""
        self._table.load([view])


def remaining(script: OracleScript, view: RequestView) -> tuple[int, ...]:
    """Return the next tokens of the request's continuation, as many as are wanted at most."""
    continuation = find(script.continuations, view)
    if continuation is None:
        return ()
    num_output = len(view.ids_target) - view.num_prompt_tokens
    return continuation[num_output : num_output + view.num_drafts]
