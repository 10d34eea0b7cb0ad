"""What a script says, on the device: the expected token of each position, and which drafts change.

A slot's rows are written when its request is first observed, on the eager path, and read by rounds
without host reads. Whether a draft is replaced is a function of the script's seed, the prompt, the
draft's absolute position and its index in the round. It is drawn for all of a prompt at once, and
ahead for the prompts that the script names, so that a request that enters costs copies; scripted
counts go by the rounds that a request had.

Legend: S slots, the last one for padding; P absolute positions, G drafts of a round, B requests,
K prompts, N new requests, L tokens of the longest continuation among them.
"""

from __future__ import annotations

import math
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
_MOST_KEPT_BYTES = 1 << 28  # of what is drawn ahead; other prompts are drawn when they come
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


class DraftActions:
    """What becomes of every draft of a prompt: kept, made right or made wrong."""

    def __init__(self, script: OracleScript, room: Room, *, device: torch.device) -> None:
        """Draw ahead for the prompts that the script names, as many as memory is meant for."""
        self._shape = (room.max_length, room.max_drafts)
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
        prompts = (key for key in script.continuations if not isinstance(key, str))
        digests = list(dict.fromkeys(prompt_digest(prompt) for prompt in prompts))
        del digests[_MOST_KEPT_BYTES // max(1, math.prod(self._shape)) :]
        self._place_of = {digest: place for place, digest in enumerate(digests)}
        self._kept_KPG = self.draw(on_device(digests, device=device))

    def place_of(self, digest: int) -> int | None:
        """Return where the actions of a prompt are among those drawn ahead, if they are there."""
        return self._place_of.get(digest)

    def kept(self, places_K: torch.Tensor) -> torch.Tensor:
        """Return int8 [K, P, G] of prompts that were drawn ahead."""
        return self._kept_KPG.index_select(0, places_K)

    def draw(self, digests_K: torch.Tensor) -> torch.Tensor:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _NewRow:
    """A request without rows.

    Args:
        first: position of its first output token.
        known: what the script expects from there on.
        digest: of its prompt.
        place: of its actions among those drawn ahead, None: they are not there.
    """

    slot: int
    first: int
    known: tuple[int, ...]
    digest: int
    place: int | None


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
        self._actions: DraftActions | None = None
        self._actions_SPG: torch.Tensor | None = None
        if not script.accept_counts and (script.corruption_rates or script.replacement_rate):
            self._actions = DraftActions(script, room, device=device)
            self._actions_SPG = torch.zeros(
                (*shape, room.max_drafts), dtype=torch.int8, device=device
            )
        self._wrong_R = on_device(script.accept_counts, device=device)

    def load(self, views: Sequence[RequestView]) -> None:
        """Write the rows of requests that have none yet: one upload for all of them.

        Sync: none.
        """
        new = [self._new_row(view) for view in views if view.slot not in self._loaded]
        if not new:
            return
        self._loaded.update(row.slot for row in new)
        new.sort(key=lambda row: row.place is None)  # those drawn ahead come first
        num_kept = sum(row.place is not None for row in new)
        longest = max(len(row.known) for row in new)
        table = [
            [row.slot, row.first, row.digest if row.place is None else row.place, *row.known]
            + [_UNKNOWN] * (longest - len(row.known))
            for row in new
        ]
        uploaded_NX = on_device(table, device=self._device)
        slots_N, known_NL = uploaded_NX[:, 0].contiguous(), uploaded_NX[:, 3:]
        num_positions = self._expected_SP.shape[1]
        # What lies beyond the last position goes to a column that is left out.
        rows_NP = known_NL.new_full((len(new), num_positions + 1), _UNKNOWN)
        places_NL = uploaded_NX[:, 1:2] + torch.arange(longest, device=self._device)
        rows_NP.scatter_(1, places_NL.clamp(max=num_positions), known_NL)
        self._expected_SP.index_copy_(0, slots_N, rows_NP[:, :num_positions])
        self._rounds_S.index_fill_(0, slots_N, 0)
        if self._actions is None or self._actions_SPG is None:
            return
        kept_K, drawn_K = uploaded_NX[:num_kept, 2], uploaded_NX[num_kept:, 2]
        if num_kept:
            self._actions_SPG.index_copy_(0, slots_N[:num_kept], self._actions.kept(kept_K))
        if num_kept < len(new):
            self._actions_SPG.index_copy_(0, slots_N[num_kept:], self._actions.draw(drawn_K))

    def _new_row(self, view: RequestView) -> _NewRow:
        prompt, first = prompt_of(view), view.num_prompt_tokens
        digest = prompt_digest(prompt)
        return _NewRow(
            slot=view.slot,
            first=first,
            known=(find(self._script.continuations, view) or ())[
                : self._expected_SP.shape[1] - first
            ],
            digest=digest,
            place=None if self._actions is None else self._actions.place_of(digest),
        )

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
