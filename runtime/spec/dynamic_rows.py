"""Dynamic rows of a reduced head: ids outside the map whose exact logits are computed beside it.

A token map loses the rare words of a text. Two sources bring them back for greedy drafts:

- the request's own ids outside the map (prompt and committed text). A slot keeps the newest
  `num_rows` distinct ones, oldest out first: a function of the request's tokens alone, so the eager
  form (told by the host) and the form of rounds on the device (told by the target's choices) hold
  the same ids and propose the same drafts.
- with a rank, the `NUM_SCORED` ids outside the map that a low-rank projection of the head scores
  highest for a row.

Their logits have the bits of the full head and compete with the map's by (logit, lowest target
id). Output never changes: a draft is verified whoever proposed it.

Legend: B requests, M rows, W rows of each request in a round, S slots, E own ids of a slot, C ids
outside the map, H hidden, V target vocabulary, r rank.
*Source:* vLLM pull request 59740 (dynamic rows of a draft token map).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.batch import RoundRequests, RoundStates, on_device
from runtime.kernels import (
    HeadRows,
    NamedRows,
    RowNorm,
    head_logits,
    joint_head_argmax,
    keep_own_ids,
    linear,
    plain_rows,
    rms_norm,
)
from runtime.spec.draft_choice import DraftHead
from runtime.spec.types import RequestView

NUM_SCORED = 64
"""Ids that the projection brings to a row."""

_ITERATIONS = 4  # of the subspace: the tail of a head's spectrum is flat, more moves little
_OVERSAMPLING = 8
_CHUNK = 16_384  # head rows made float32 at a time


class ReducedHead(DraftHead, Protocol):
    """A draft's head over a map."""

    @property
    def head_RH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the full head in draft-id order."""

    @property
    def head_norm(self) -> RowNorm | None:
        """What the head does to its rows before the product."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DynamicRowSettings:
    """Which rows may join a reduced head.

    Args:
        full_head_VH: every row that the target can choose; the map's rows are copies of these.
        num_rows: own ids of a slot, 0 for none.
        rank: of the projection, 0 for none.
    """

    full_head_VH: torch.Tensor
    num_rows: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankScorer:
    """Scores ids outside the map with a projection of the head to few dimensions.

    Args:
        basis_rH: orthonormal rows, the head's leading right singular vectors.
        rows_Cr: the outside rows of the head, projected.
        ids_target_C: int64, their target ids.
    """

    basis_rH: torch.Tensor
    rows_Cr: torch.Tensor
    ids_target_C: torch.Tensor

    @classmethod
    def build(cls, head_VH: torch.Tensor, ids_target_C: torch.Tensor, *, rank: int) -> RankScorer:
        """Project the head; the subspace starts from fixed random numbers, so a head has one.

        Args:
            head_VH: the full head.
            ids_target_C: int64, the ids to score.
            rank: dimensions, at most H.
        """
        basis_Hr = _leading_subspace(head_VH, rank)
        rows = [
            head_VH[ids_target_C[start : start + _CHUNK]].float() @ basis_Hr
            for start in range(0, ids_target_C.shape[0], _CHUNK)
        ]
        return cls(
            basis_rH=basis_Hr.t().contiguous().to(head_VH.dtype),
            rows_Cr=torch.cat(rows).to(head_VH.dtype),
            ids_target_C=ids_target_C,
        )

    def best(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Return int64 target ids [M, NUM_SCORED], or all there are, of the highest scores."""
        scores_MC = head_logits(linear(x_MH, self.basis_rH), self.rows_Cr)
        count = min(NUM_SCORED, scores_MC.shape[1])
        return self.ids_target_C[scores_MC.topk(count, dim=1).indices]


def _leading_subspace(head_VH: torch.Tensor, rank: int) -> torch.Tensor:
    """Return float32 [H, rank]: an orthonormal basis near the leading right singular vectors."""
    width = head_VH.shape[1]
    generator = torch.Generator().manual_seed(0)
    columns = min(width, rank + _OVERSAMPLING)
    basis = torch.randn((width, columns), generator=generator).to(head_VH.device)
    for _ in range(_ITERATIONS):
        basis, _ = torch.linalg.qr(basis)
        product = torch.zeros_like(basis)
        for start in range(0, head_VH.shape[0], _CHUNK):
            rows_f32 = head_VH[start : start + _CHUNK].float()
            product += rows_f32.t() @ (rows_f32 @ basis)
        basis = product
    leading: torch.Tensor = torch.linalg.qr(basis)[0][:, :rank]
    return leading


@dataclass(kw_only=True, slots=True)
class _Own:
    """A slot's own ids as the host knows them.

    Args:
        ring: ids outside the map; the place of the next one is `count % num_rows`.
        count: distinct ids taken so far, those that left again included.
        num_seen: tokens of the request that were looked at.
    """

    ring: list[int] = field(default_factory=list)
    count: int = 0
    num_seen: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SlotHead:
    """A `DraftHead` over the map whose best ids are those of `DynamicRows` in some slots."""

    reduced: ReducedHead
    rows: DynamicRows
    slots_M: torch.Tensor

    @property
    def draft_to_target_R(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Absolute target id of each draft id, int64."""
        return self.reduced.draft_to_target_R

    def logits(self, head_input_MH: HeadRows) -> torch.Tensor:
        """Return fp32 logits [M, R] over the map: sampled drafts have no dynamic rows."""
        return self.reduced.logits(head_input_MH)

    def propose_ids(
        self, head_input_MH: HeadRows, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int64 target ids [M]; `copy_M` takes them, too."""
        return self.rows.propose_ids(head_input_MH, self.slots_M, copy_M)


class DynamicRows:
    """Per-slot ids outside the map, and the choice among the map's ids and them."""

    def __init__(
        self, reduced: ReducedHead, settings: DynamicRowSettings, *, num_slots: int
    ) -> None:
        """Start with no ids in any slot.

        Args:
            reduced: the draft's head over the map.
            settings: the full head, and how many rows of it.
            num_slots: rows of the per-slot state, padding included.
        """
        full_head_VH, num_rows, rank = settings.full_head_VH, settings.num_rows, settings.rank
        device = full_head_VH.device
        is_outside_V = torch.ones(full_head_VH.shape[0], dtype=torch.bool, device=device)
        # A map may hold rows above the tokenizer (SD438), which the full head does not have.
        inside_R = reduced.draft_to_target_R
        is_outside_V[inside_R[inside_R < full_head_VH.shape[0]]] = False
        self._reduced = reduced
        self._full_head_VH = full_head_VH
        self._num_rows = num_rows
        self._is_outside_V = is_outside_V
        self._outside = frozenset(is_outside_V.nonzero().flatten().tolist())
        self._ids_target_SE = torch.full((num_slots, num_rows), -1, device=device)
        self._counts_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._own: dict[int, _Own] = {}
        self._scorer = None
        if rank and self._outside:
            self._scorer = RankScorer.build(
                full_head_VH, is_outside_V.nonzero().flatten(), rank=rank
            )

    def head(self, slots_M: torch.Tensor) -> DraftHead:
        """Return the head for rows that belong to these slots."""
        return _SlotHead(reduced=self._reduced, rows=self, slots_M=slots_M)

    def propose_ids(
        self, head_input_MH: HeadRows, slots_M: torch.Tensor, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int64 target ids [M]: the best of the map's, the slot's own and the scored ids.

        `copy_M` takes them, too.

        Sync: none.
        """
        reduced, scored_MC = self._reduced, None
        norm = reduced.head_norm
        if self._scorer is not None:
            rows_MH = plain_rows(head_input_MH)
            if norm is not None:
                rows_MH = rms_norm(rows_MH, norm.weight_D, norm.eps)
            scored_MC = self._scorer.best(rows_MH)
        named = NamedRows(
            weight_VD=self._full_head_VH,
            ids_SE=self._ids_target_SE,
            slots_M=slots_M,
            more_ids_MC=scored_MC,
        )
        ids_target_M, _ = joint_head_argmax(
            head_input_MH,
            reduced.head_RH,
            named,
            norm,
            names_R=reduced.draft_to_target_R,
            copy_M=copy_M,
        )
        return ids_target_M

    def follow(self, views: Sequence[RequestView]) -> None:
        """Take in the tokens of requests as the host knows them.

        Sync: none.
        """
        changed = [view.slot for view in views if self._take(view)] if self._num_rows else []
        if not changed:
            return
        device = self._counts_S.device
        rows = [
            [*self._own[slot].ring, *[-1] * (self._num_rows - len(self._own[slot].ring))]
            for slot in changed
        ]
        slots_M = on_device(changed, device=device)
        self._ids_target_SE.index_copy_(0, slots_M, on_device(rows, device=device))
        counts = [self._own[slot].count for slot in changed]
        self._counts_S.index_copy_(0, slots_M, on_device(counts, device=device))

    def follow_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Take in what a round commits, as `follow` will once the host has read it.

        Sync: none.
        """
        if not self._num_rows:
            return
        layout = requests.layout
        keep_own_ids(
            self._ids_target_SE,
            self._counts_S,
            requests.slots_B,
            states.next_ids_target_N,
            first_rows_B=None if layout is None else layout.first_rows_B,
            last_rows_B=states.last_rows_B,
            is_outside_V=self._is_outside_V,
            width=requests.positions_BW.shape[1],
        )

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._own.pop(slot, None)

    def _take(self, view: RequestView) -> bool:
        """Look at the tokens that are new since the last time; whether the slot's row changed."""
        own, is_changed = self._own.get(view.slot), False
        if own is None:
            own, is_changed = _Own(), True
            self._own[view.slot] = own
        for position in range(own.num_seen, len(view.ids_target)):
            token = view.ids_target[position]
            if token not in self._outside or token in own.ring:
                continue
            if len(own.ring) < self._num_rows:
                own.ring.append(token)
            else:
                own.ring[own.count % self._num_rows] = token
            own.count += 1
            is_changed = True
        own.num_seen = len(view.ids_target)
        return is_changed
