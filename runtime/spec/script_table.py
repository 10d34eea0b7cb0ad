"""What a script says, on the device: the expected token of each position, and which drafts change.

A slot's rows are written when its request is first observed, on the eager path, and read by rounds
without host reads. Whether a draft is replaced is a function of the script's seed, the prompt, the
draft's absolute position and its index in the round, drawn once for all of them; scripted counts go
by the rounds that a request had.

Legend: S slots, the last one for padding; P absolute positions, G drafts of a round, B requests.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from runtime.kernels.noise import NoiseRows, uniform, words_at
from runtime.spec.host import on_device
from runtime.spec.noise import DrawKind, NoiseKey, noise_rows
from runtime.spec.types import RequestView

# A script finds a request by its prompt, or by its id where two requests share a prompt.
ScriptKey = tuple[int, ...] | str

_UNKNOWN = -1
_KEEP, _RIGHT, _WRONG = 0, 1, 2
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleScript:
    """What to propose; target ids throughout.

    Beside a draft (a proposer that runs one is given a script) the drafts are the draft's own, and
    `replacement_rate`, `corruption_rates` and `accept_counts` say which of them are replaced.

    Args:
        continuations: prompt ids (or request id) -> the output that the target makes of it.
            Drafts are its next tokens; none are proposed beyond its end. For rounds on the device
            it should reach a round beyond what is asked for: there a round has all its drafts, and
            those beyond the end are wrong.
        corruption_rates: probability that draft j of a round is changed to another id; the last
            entry serves all later drafts, empty changes none. The draw is a function of `seed`, the
            prompt, the draft's absolute position and its index.
        accept_counts: if not empty, round r of a request has exactly its draft with index
            `accept_counts[r % len]` changed (none when there is no such draft); beside a draft, all
            drafts before it are the continuation's, so that this many are accepted.
        rounds: prompt ids (or request id) -> drafts of round 0, 1, ... verbatim, instead of a
            continuation; no drafts once they are used up. Only rounds that got drafts count, so
            none of these may be empty. Not for rounds on the device, nor beside a draft.
        replacement_rate: beside a draft: probability that a draft becomes the continuation's token.
        seed: of the draws.
    """

    continuations: Mapping[ScriptKey, tuple[int, ...]] = field(default_factory=dict)
    corruption_rates: tuple[float, ...] = ()
    accept_counts: tuple[int, ...] = ()
    rounds: Mapping[ScriptKey, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    replacement_rate: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much state a proposer keeps for rounds on the device.

    Args:
        num_slots: requests that may run at once, and one for padding.
        max_length: tokens of a request at most.
        max_drafts: drafts of a round at most.
    """

    num_slots: int
    max_length: int
    max_drafts: int


def other_id(id_target: int) -> int:
    """Return an id that differs and exists in every vocabulary of two or more."""
    return id_target - 1 if id_target > 0 else 1


def find(table: Mapping[ScriptKey, _T], view: RequestView) -> _T | None:
    """Look a request up by its id, then by its prompt."""
    found = table.get(view.request_id)
    return table.get(prompt_of(view)) if found is None else found


def prompt_of(view: RequestView) -> tuple[int, ...]:
    """Return the ids of the prompt."""
    return tuple(view.ids_target[: view.num_prompt_tokens])


def draw_key(script: OracleScript, prompt: tuple[int, ...], position: int) -> NoiseKey:
    """Return what names the draws at a position; the lane is the draft's index."""
    digest = zlib.crc32(repr(prompt).encode("ascii"))
    return NoiseKey(seed=script.seed, choice_index=digest, position=position)


class ScriptTable:
    """The script of the running requests, by slot."""

    def __init__(self, script: OracleScript, room: Room, *, device: torch.device) -> None:
        """Allocate rows for all slots; no slot has a request."""
        assert not script.rounds, "verbatim rounds have no form on the device"
        self._script = script
        self._device = device
        self._loaded: set[int] = set()
        shape = (room.num_slots, room.max_length)
        self._expected_SP = torch.full(shape, _UNKNOWN, dtype=torch.int64, device=device)
        self._rounds_S = torch.zeros(room.num_slots, dtype=torch.int64, device=device)
        self._offset_G = torch.arange(room.max_drafts, device=device)
        self._actions_SPG: torch.Tensor | None = None
        if not script.accept_counts and (script.corruption_rates or script.replacement_rate):
            self._actions_SPG = torch.zeros(
                (*shape, room.max_drafts), dtype=torch.int8, device=device
            )
        self._wrong_R = on_device(script.accept_counts, device=device)

    def load(self, views: Sequence[RequestView]) -> None:
        """Write the rows of requests that have none yet.

        Sync: none.
        """
        for view in views:
            if view.slot in self._loaded:
                continue
            self._loaded.add(view.slot)
            row_P = self._expected_SP[view.slot].fill_(_UNKNOWN)
            self._rounds_S[view.slot].zero_()
            continuation = find(self._script.continuations, view)
            if continuation is not None:
                first = view.num_prompt_tokens
                known = continuation[: row_P.shape[0] - first]
                row_P[first : first + len(known)] = on_device(known, device=self._device)
            if self._actions_SPG is not None:
                self._draw(self._actions_SPG[view.slot], view)

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._loaded.discard(slot)

    def drafts(
        self,
        slots_B: torch.Tensor,
        lengths_B: torch.Tensor,
        own_BG: torch.Tensor | None,
        count: int,
    ) -> torch.Tensor:
        """Return int64 target ids [B, count] of a round, and count the round.

        Args:
            slots_B: int64, rows of the table.
            lengths_B: int64, position of the newest token.
            own_BG: int64, what a draft proposes; None: the script proposes.
            count: drafts of each request.

        Sync: none.
        """
        offset_G = self._offset_G[:count]
        last = self._expected_SP.shape[1] - 1
        positions_BG = (lengths_B[:, None] + 1 + offset_G).clamp(max=last)
        expected_BG = self._expected_SP[slots_B[:, None], positions_BG]
        is_known_BG = expected_BG >= 0
        ids_BG = expected_BG.clamp(min=0) if own_BG is None else own_BG
        wrong_BG = torch.where(expected_BG > 0, expected_BG - 1, 1)
        rounds_B = self._rounds_S.index_select(0, slots_B)
        if self._script.accept_counts:
            wrong_B = self._wrong_R[rounds_B % self._wrong_R.shape[0]]
            is_wrong_BG = offset_G == wrong_B[:, None]
            is_right_BG = offset_G < wrong_B[:, None]
        elif self._actions_SPG is not None:
            action_BG = self._actions_SPG[slots_B[:, None], positions_BG, offset_G]
            is_wrong_BG, is_right_BG = action_BG == _WRONG, action_BG == _RIGHT
        else:
            is_wrong_BG = is_right_BG = torch.zeros_like(is_known_BG)
        self._rounds_S.index_copy_(0, slots_B, rounds_B + 1)
        ids_BG = torch.where(is_right_BG & is_known_BG, expected_BG, ids_BG)
        return torch.where(is_wrong_BG & is_known_BG, wrong_BG, ids_BG)

    def _draw(self, actions_PG: torch.Tensor, view: RequestView) -> None:
        """Decide about every draft that may come at every position."""
        num_positions, num_drafts = actions_PG.shape
        first = noise_rows([draw_key(self._script, prompt_of(view), 0)], device=self._device)
        rows = NoiseRows(
            seed_low_M=first.seed_low_M.expand(num_positions),
            seed_high_M=first.seed_high_M.expand(num_positions),
            choice_index_M=first.choice_index_M.expand(num_positions),
            position_M=torch.arange(num_positions, device=self._device),
        )
        draws_PG = uniform(words_at(rows, self._offset_G, DrawKind.ORACLE))
        rates = self._script.corruption_rates or (0.0,)
        wrong_G = on_device(
            [rates[min(j, len(rates) - 1)] for j in range(num_drafts)],
            dtype=torch.float64,
            device=self._device,
        )
        is_right_PG = draws_PG >= 1.0 - self._script.replacement_rate
        actions_PG.copy_(torch.where(is_right_PG, _RIGHT, _KEEP))
        actions_PG[draws_PG < wrong_G] = _WRONG
