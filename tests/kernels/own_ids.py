"""Rounds that commit ids, and what a slot keeps of them told token by token.

Legend: S slots, the last one for padding; E places of a slot's ring; B requests; N verified rows,
W of each request or, packed, its own ones; V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NUM_IDS = 14  # few, so that ids come again and again
NUM_SLOTS = 7
PADDING = NUM_SLOTS - 1
IS_OUTSIDE = torch.arange(NUM_IDS) % 3 != 0

Keep = Callable[..., None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rings:
    """What slots keep.

    Args:
        ids_SE: int64, -1 where free.
        counts_S: int64.
    """

    ids_SE: torch.Tensor
    counts_S: torch.Tensor

    @classmethod
    def empty(cls, num_places: int, device: str = "cpu") -> Rings:
        """Return slots that took nothing yet."""
        return cls(
            ids_SE=torch.full((NUM_SLOTS, num_places), -1, device=device),
            counts_S=torch.zeros(NUM_SLOTS, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CommittingRound:
    """A round of real requests and two of padding.

    Args:
        slots_B: int64.
        next_ids_N: int64, the choice at each row.
        first_rows_B: int64, as a packed layout has them; None of a dense round.
        last_rows_B: int64.
        width: W.
        committed: ids of each real request, in order.
    """

    slots_B: torch.Tensor
    next_ids_N: torch.Tensor
    first_rows_B: torch.Tensor | None
    last_rows_B: torch.Tensor
    width: int
    committed: list[list[int]]

    def keep(self, keep: Keep, rings: Rings) -> None:
        """Take the round in with an op."""
        first, device = self.first_rows_B, rings.ids_SE.device
        keep(
            rings.ids_SE,
            rings.counts_S,
            self.slots_B.to(device),
            self.next_ids_N.to(device),
            first_rows_B=None if first is None else first.to(device),
            last_rows_B=self.last_rows_B.to(device),
            is_outside_V=IS_OUTSIDE.to(device),
            width=self.width,
        )

    def keep_by_hand(self, rings: Rings) -> None:
        """Take the round in token by token."""
        num_places = rings.ids_SE.shape[1]
        for slot, tokens in zip(self.slots_B.tolist(), self.committed, strict=False):
            ring, count = rings.ids_SE[slot].tolist(), int(rings.counts_S[slot])
            for token in tokens:
                if bool(IS_OUTSIDE[token]) and token not in ring:
                    ring[count % num_places] = token
                    count += 1
            rings.ids_SE[slot] = torch.tensor(ring)
            rings.counts_S[slot] = count


def make_round(width: int, *, is_packed: bool, generator: torch.Generator) -> CommittingRound:
    """Return a round with random ids of 1 to 4 requests, each with some of its drafts accepted."""

    def draw(most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=generator))

    num_real = 1 + draw(3)
    num_requests = num_real + 2
    slots = torch.randperm(PADDING, generator=generator)[:num_real].tolist()
    accepted = [draw(width - 1) for _ in range(num_real)] + [0, 0]
    sizes = [width] * num_requests
    if is_packed:  # drafts that were not accepted have rows, too; padding has none
        sizes = [1 + most + draw(width - 1 - most) for most in accepted[:num_real]] + [0, 0]
    ends = torch.tensor(sizes).cumsum(0)
    num_rows = int(ends[-1]) + 2 * is_packed * draw(1)  # padding rows, or none
    first_B = (ends - torch.tensor(sizes)).clamp(max=num_rows - 1)
    ids_N = torch.randint(0, NUM_IDS, (num_rows,), generator=generator)
    last_B = (first_B + torch.tensor(accepted)).clamp(max=num_rows - 1)
    bounds = zip(first_B.tolist(), last_B.tolist()[:num_real], strict=False)
    return CommittingRound(
        slots_B=torch.tensor([*slots, PADDING, PADDING]),
        next_ids_N=ids_N,
        first_rows_B=first_B if is_packed else None,
        last_rows_B=last_B,
        width=width,
        committed=[ids_N[first : last + 1].tolist() for first, last in bounds],
    )
