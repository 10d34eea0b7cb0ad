"""What a script says, on the device: the expected token of each position, and which drafts change.

A slot's rows are written when its request is first observed, on the eager path, and read by rounds
without host reads. Whether a draft is replaced is a function of the script's seed, the prompt, the
draft's absolute position and its index in the round. All of this is written down ahead for the
prompts that the script names, so that requests that enter together cost a few copies, however many
they are and however long; scripted counts go by the rounds that a request had.

Legend: S slots, the last one for padding; P absolute positions, G drafts of a round, B requests,
K requests or prompts that have rows, N new requests, L tokens of the longest continuation.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from runtime.batch import on_device
from runtime.kernels.noise import NoiseRows, uniform, words_at
from runtime.spec.noise import DrawKind, NoiseKey, noise_rows
from runtime.spec.types import RequestView

# A script finds a request by its prompt, or by its id where two requests share a prompt.
ScriptKey = tuple[int, ...] | str

_UNKNOWN = -1
_KEEP, _RIGHT, _WRONG = 0, 1, 2
_MOST_KEPT_BYTES = 1 << 28  # of rows that are made ahead; others are made when they are needed
_DRAWS_AT_ONCE = 1 << 20  # a draw takes some hundred bytes on its way
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
    return NoiseKey(seed=script.seed, choice_index=prompt_digest(prompt), position=position)


def prompt_digest(prompt: tuple[int, ...]) -> int:
    """Return 32 bits that stand for a prompt in draws."""
    return zlib.crc32(repr(prompt).encode("ascii"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """What a script says of one request.

    Args:
        first: position of its first output token.
        known: what is expected from there on.
        digest: of its prompt.
    """

    first: int
    known: tuple[int, ...]
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRows:
    """What a script says of requests, position by position.

    Args:
        expected_KP: int64 target ids, -1 where nothing is known.
        actions_KPG: int8, what becomes of each draft: kept, made right or made wrong; None where
            that does not follow from draws.
    """

    expected_KP: torch.Tensor
    actions_KPG: torch.Tensor | None

    def select(self, places_N: torch.Tensor) -> ScriptRows:
        """Return copies of the rows at these places."""
        actions_KPG = self.actions_KPG
        return ScriptRows(
            expected_KP=self.expected_KP.index_select(0, places_N),
            actions_KPG=None if actions_KPG is None else actions_KPG.index_select(0, places_N),
        )


class RowMaker:
    """Makes rows of requests.

    Attributes:
        num_bytes: of one request's rows.
    """

    def __init__(self, script: OracleScript, room: Room, *, device: torch.device) -> None:
        """Follow a script."""
        self._shape = (room.max_length, room.max_drafts)
        self._device = device
        self._draws = not script.accept_counts and bool(
            script.corruption_rates or script.replacement_rate
        )
        self._right_from = 1.0 - script.replacement_rate
        self._positions_P = torch.arange(room.max_length, device=device)
        self._offset_G = torch.arange(room.max_drafts, device=device)
        self._seed = noise_rows([draw_key(script, (), 0)], device=device)
        rates = script.corruption_rates or (0.0,)
        self._wrong_below_G = on_device(
            [rates[min(j, len(rates) - 1)] for j in range(room.max_drafts)],
            dtype=torch.float64,
            device=device,
        )
        self.num_bytes = room.max_length * (8 + room.max_drafts * self._draws)

    def make(self, said: Sequence[_Said]) -> ScriptRows:
        """Return the rows of requests: one upload for all of them.

        Sync: none.
        """
        num_positions = self._shape[0]
        longest = max((len(item.known) for item in said), default=0)
        table = [
            [item.first, item.digest, *item.known, *[_UNKNOWN] * (longest - len(item.known))]
            for item in said
        ]
        uploaded_KX = on_device(table, device=self._device).view(len(said), 2 + longest)
        known_KL = uploaded_KX[:, 2:]
        # What lies beyond the last position goes to a column that is left out.
        rows_KP = known_KL.new_full((len(said), num_positions + 1), _UNKNOWN)
        places_KL = uploaded_KX[:, :1] + torch.arange(longest, device=self._device)
        rows_KP.scatter_(1, places_KL.clamp(max=num_positions), known_KL)
        return ScriptRows(
            expected_KP=rows_KP[:, :num_positions],
            actions_KPG=self._draw(uploaded_KX[:, 1]) if self._draws else None,
        )

    def _draw(self, digests_K: torch.Tensor) -> torch.Tensor:
        """Return int8 [K, P, G] of prompts with these digests, int64."""
        num_positions, num_drafts = self._shape
        actions_KPG = digests_K.new_empty((digests_K.shape[0], *self._shape), dtype=torch.int8)
        size = max(1, _DRAWS_AT_ONCE // max(1, num_positions * num_drafts))
        for start in range(0, digests_K.shape[0], size):
            part_K = digests_K[start : start + size]
            num_rows = part_K.shape[0] * num_positions
            rows = NoiseRows(
                seed_low_M=self._seed.seed_low_M.expand(num_rows),
                seed_high_M=self._seed.seed_high_M.expand(num_rows),
                choice_index_M=part_K[:, None].expand(-1, num_positions).flatten(),
                position_M=self._positions_P.repeat(part_K.shape[0]),
            )
            draws_MG = uniform(words_at(rows, self._offset_G, DrawKind.ORACLE))
            actions_MG = torch.where(draws_MG >= self._right_from, _RIGHT, _KEEP)
            actions_MG.masked_fill_(draws_MG < self._wrong_below_G, _WRONG)
            actions_KPG[start : start + size] = actions_MG.view(part_K.shape[0], *self._shape)
        return actions_KPG


class ScriptTable:
    """The script of the running requests, by slot."""

    def __init__(self, script: OracleScript, room: Room, *, device: torch.device) -> None:
        """Make rows for the prompts that the script names; no slot has a request."""
        assert not script.rounds, "verbatim rounds have no form on the device"
        self._script = script
        self._device = device
        self._loaded: set[int] = set()
        self._max_length = room.max_length
        self._maker = RowMaker(script, room, device=device)
        most = _MOST_KEPT_BYTES // max(1, self._maker.num_bytes)
        named = [key for key in script.continuations if not isinstance(key, str)][:most]
        self._place_of = {prompt: place for place, prompt in enumerate(named)}
        self._kept = self._maker.make(
            [self._said(prompt, script.continuations[prompt]) for prompt in named]
        )
        self._expected_SP = torch.full(
            (room.num_slots, room.max_length), _UNKNOWN, dtype=torch.int64, device=device
        )
        self._rounds_S = torch.zeros(room.num_slots, dtype=torch.int64, device=device)
        self._offset_G = torch.arange(room.max_drafts, device=device)
        self._actions_SPG: torch.Tensor | None = None
        if self._kept.actions_KPG is not None:
            self._actions_SPG = self._kept.actions_KPG.new_zeros(
                (*self._expected_SP.shape, room.max_drafts)
            )
        self._wrong_R = on_device(script.accept_counts, device=device)

    def load(self, views: Sequence[RequestView]) -> None:
        """Write the rows of requests that have none yet: copies, where they were made ahead.

        Sync: none.
        """
        ahead: list[tuple[int, int]] = []
        late: list[RequestView] = []
        for view in views:
            if view.slot in self._loaded:
                continue
            self._loaded.add(view.slot)
            is_named = view.request_id in self._script.continuations
            place = None if is_named else self._place_of.get(prompt_of(view))
            if place is None:
                late.append(view)
            else:
                ahead.append((view.slot, place))
        if ahead:
            slots_N, places_N = on_device([*zip(*ahead, strict=True)], device=self._device)
            self._write(slots_N, self._kept.select(places_N))
        if late:
            continuations = self._script.continuations
            said = [self._said(prompt_of(view), find(continuations, view) or ()) for view in late]
            slots_N = on_device([view.slot for view in late], device=self._device)
            self._write(slots_N, self._maker.make(said))

    def _said(self, prompt: tuple[int, ...], known: tuple[int, ...]) -> _Said:
        room = self._max_length - len(prompt)
        return _Said(first=len(prompt), known=known[: max(0, room)], digest=prompt_digest(prompt))

    def _write(self, slots_N: torch.Tensor, rows: ScriptRows) -> None:
        self._expected_SP.index_copy_(0, slots_N, rows.expected_KP)
        self._rounds_S.index_fill_(0, slots_N, 0)
        if self._actions_SPG is not None and rows.actions_KPG is not None:
            self._actions_SPG.index_copy_(0, slots_N, rows.actions_KPG)

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
