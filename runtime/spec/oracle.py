"""Scripted drafts: any acceptance pattern without weights.

A script knows the continuation of each prompt (the target's own answer, from a run without drafts)
and proposes it, changed where the script says so: at a per-position rate, so that a wanted accept
length can be served, or at one fixed draft per round, so that a test can force every count.
Verbatim drafts per round are possible as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from runtime.spec.host import pad_proposal
from runtime.spec.noise import DrawKind, NoiseKey, noise_words, uniform
from runtime.spec.types import Observation, Proposal, RequestView

# A script finds a request by its prompt, or by its id where two requests share a prompt.
ScriptKey = tuple[int, ...] | str

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleScript:
    """What to propose; target ids throughout.

    Args:
        continuations: prompt ids (or request id) -> the output that the target makes of it.
            Drafts are its next tokens; none are proposed beyond its end.
        corruption_rates: probability that draft j of a round is changed to another id; the last
            entry serves all later drafts, empty changes none. The draw is a function of `seed`, the
            prompt, the draft's absolute position and its index.
        accept_counts: if not empty, round r of a request has exactly its draft with index
            `accept_counts[r % len]` changed (none when there is no such draft).
        rounds: prompt ids (or request id) -> drafts of round 0, 1, ... verbatim, instead of a
            continuation; no drafts once they are used up. Only rounds that got drafts count, so
            none of these may be empty.
        seed: of the corruption draws.
    """

    continuations: Mapping[ScriptKey, tuple[int, ...]] = field(default_factory=dict)
    corruption_rates: tuple[float, ...] = ()
    accept_counts: tuple[int, ...] = ()
    rounds: Mapping[ScriptKey, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    seed: int = 0


def other_id(id_target: int) -> int:
    """Return an id that differs and exists in every vocabulary of two or more."""
    return id_target - 1 if id_target > 0 else 1


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

    def _drafts(self, view: RequestView) -> list[int]:
        """Return the drafts of the request's next round."""
        done = self._rounds_done.get(view.slot, 0)
        prompt = tuple(view.ids_target[: view.num_prompt_tokens])
        rounds = _find(self._script.rounds, view, prompt)
        if rounds is not None:
            return list(rounds[done][: view.num_drafts]) if done < len(rounds) else []
        continuation = _find(self._script.continuations, view, prompt)
        if continuation is None:
            return []
        num_output = len(view.ids_target) - view.num_prompt_tokens
        drafts = list(continuation[num_output : num_output + view.num_drafts])
        is_changed = self._changes(len(view.ids_target), len(drafts), prompt, done)
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
        prompt_digest = zlib.crc32(repr(prompt).encode("ascii"))
        keys = [
            NoiseKey(seed=script.seed, choice_index=prompt_digest, position=first_position + j)
            for j in range(num_drafts)
        ]
        lanes = torch.arange(num_drafts, dtype=torch.int64)
        draws = uniform(noise_words(keys, lanes, kind=DrawKind.ORACLE).diagonal()).tolist()
        rates = script.corruption_rates
        return [draw < rates[min(j, len(rates) - 1)] for j, draw in enumerate(draws)]


def _find(table: Mapping[ScriptKey, _T], view: RequestView, prompt: tuple[int, ...]) -> _T | None:
    """Look a request up by its id, then by its prompt."""
    found = table.get(view.request_id)
    return table.get(prompt) if found is None else found
