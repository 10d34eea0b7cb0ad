"""Accepted lengths by a schedule, not by the target: for timing rounds at any accept length.

Drafts and target run in full, then the first `a` drafts of a round are committed whatever the
target chose, followed by the target's own choice at that row. The text is worth nothing: drafts
stand in it unverified. `a` is a function of the seed, the request's slot and its length alone, in
integers, so that rounds on the device and the eager path follow one schedule.

Legend: B requests, G drafts, W = G + 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.spec.types import Proposal, RoundResult
from runtime.spec.verify import TargetHead, VerifyRows

_BITS = 24
_MULTIPLIERS = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x27D4EB2F165667C5)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedLengths:
    """A schedule of accepted drafts.

    Args:
        rates: chance that draft j of a round and all before it are committed, not increasing; as
            many as a round has drafts at most.
        seed: of the schedule.
    """

    rates: tuple[float, ...]
    seed: int = 0

    def accepted(
        self, slots_B: torch.Tensor, lengths_B: torch.Tensor, num_drafts_B: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [B], drafts to commit in the round, `num_drafts_B` at most.

        Args:
            slots_B: int64, of the requests.
            lengths_B: int64, positions whose KV is final.
            num_drafts_B: int64, drafts that count.

        Sync: none. Graph-safe: yes.
        """
        draws_B = _mixed(self.seed, slots_B, lengths_B)
        accepted_B = torch.zeros_like(draws_B)
        for rate in self.rates:
            accepted_B = accepted_B + (draws_B < round(rate * (1 << _BITS)))
        return torch.minimum(accepted_B, num_drafts_B)

    def choose(
        self, drafts_BG: torch.Tensor, chosen_BW: torch.Tensor, accepted_B: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [B, W]: the drafts up to the accepted length, then the target's choices.

        Sync: none. Graph-safe: yes.
        """
        offset_G = torch.arange(drafts_BG.shape[1], device=drafts_BG.device)
        is_forced_BG = offset_G < accepted_B[:, None]
        forced_BG = torch.where(is_forced_BG, drafts_BG, chosen_BW[:, :-1])
        return torch.cat([forced_BG, chosen_BW[:, -1:]], dim=1)

    def verify(
        self, target: TargetHead, hidden_ND: torch.Tensor, rows: VerifyRows, proposal: Proposal
    ) -> RoundResult:
        """Return what a greedy round commits on the eager path; see `runtime.spec.verify.verify`.

        Sync: one.
        """
        chosen = target.greedy_ids(hidden_ND).tolist()
        drafts = proposal.ids_target_BG.tolist()
        committed = []
        for b, view in enumerate(rows.views):
            count = self._count(view.slot, len(view.ids_target) - 1, proposal.num_drafts[b])
            committed.append((*drafts[b][:count], chosen[rows.first_row[b] + count]))
        return RoundResult(
            committed=tuple(committed),
            num_drafts=proposal.num_drafts,
            num_accepted_drafts=tuple(len(ids) - 1 for ids in committed),
        )

    def _count(self, slot: int, length: int, num_drafts: int) -> int:
        values = (torch.tensor([value]) for value in (slot, length, num_drafts))
        return int(self.accepted(*values))


def _mixed(seed: int, slots_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return int64 [B] of _BITS mixed bits; products wrap around."""
    first, second, third = _MULTIPLIERS
    words_B = (slots_B + 1) * first + (lengths_B + 1) * second + (seed & 0x7FFF_FFFF) * 0x9E37_79B1
    for _ in range(2):
        words_B = words_B ^ ((words_B >> 29) & 0x7_FFFF_FFFF)
        words_B = words_B * third
    return (words_B >> 33) & ((1 << _BITS) - 1)
