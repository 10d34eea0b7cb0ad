"""A whole round as one function of device tensors: draft, verify, accept, commit, observe.

Nothing here reads the device from the host, so the function may be captured; run eagerly it is the
readable twin of the captured round and serves the CPU. It gives the tokens and the draft state of
`runtime.engine.round` bit for bit: the same rows with the same positions, beside other rows.

Rows beyond a request's drafts and beyond the accepted ones are computed and ignored: they write
keys and values only where the next round writes before it reads. Rows of padding requests sit in
the padding slot and write to block 0.

Legend: B requests, G drafts, W = G + 1 rows of each request, N = B W rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.batch import (
    ConfidentDraft,
    PreparedBatch,
    RoundDraft,
    RoundRequests,
    RoundStates,
    packed,
)
from runtime.graphs.state import RoundShape, RoundState
from runtime.kernels.accept import accept
from runtime.kernels.draw import draw_accepted, draw_tokens
from runtime.kernels.noise import TOKEN_DRAW
from runtime.kv import KVLayer
from runtime.models import TargetModel


class LengthSchedule(Protocol):
    """Decides in the target's place how many drafts a round commits (benchmarks only)."""

    def accepted(
        self, slots_B: torch.Tensor, lengths_B: torch.Tensor, num_drafts_B: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [B], `num_drafts_B` at most."""

    def choose(
        self, drafts_BG: torch.Tensor, chosen_BW: torch.Tensor, accepted_B: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [B, W]: drafts up to the accepted length, then the target's choices."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceRound:
    """The round of one engine: its models, caches and state.

    Args:
        target: the model that verifies.
        target_kv: its layers of the pool.
        draft: who drafts.
        state: what rounds read and write.
        forced: in a benchmark of forced lengths, with dense rounds; None: the target decides.
    """

    target: TargetModel
    target_kv: Sequence[KVLayer]
    draft: RoundDraft
    state: RoundState
    forced: LengthSchedule | None = None

    @property
    def has_confidence(self) -> bool:
        """Whether the draft says how sure it is of its drafts."""
        return isinstance(self.draft, ConfidentDraft) and self.draft.has_confidence

    def draft_phase(self, shape: RoundShape) -> torch.Tensor:
        """Run the draft phase of `run` alone, to time it; returns its drafts [B, G].

        Sync: none (CUDA).
        """
        return self.draft.draft_round(self.state.requests(shape), shape.num_drafts)

    def run(self, shape: RoundShape) -> None:
        """Run one round of the requests in `state.slots_B[:shape.batch]`.

        Reads and advances `state`, the caches and the draft's own state; the outcome is in
        `state.output_BX`.

        Exactness: the tokens are the target's choices; padding alters no request.
        Sync: none (CUDA).
        """
        state = self.state
        requests = state.requests(shape)
        drafts_BG = self.draft.draft_round(requests, shape.num_drafts)
        ids_BW = requests.newest_ids_target_B[:, None]
        if shape.num_drafts:
            ids_BW = torch.cat([ids_BW, drafts_BG], dim=1)
        batch = requests.verify_batch(ids_BW)
        output = self.target.forward(batch, self.target_kv, self.draft.aux_layer_ids)
        chosen_N = self._choose(requests, batch, output.hidden_ND, drafts_BG)
        chosen_BW = requests.per_request(chosen_N)
        num_drafts_B = requests.num_drafts_B
        if self.forced is not None:
            num_drafts_B = self.forced.accepted(requests.slots_B, requests.lengths_B, num_drafts_B)
            chosen_BW = self.forced.choose(drafts_BG, chosen_BW, num_drafts_B)
            chosen_N = packed(chosen_BW)
        num_accepted_B, _ = accept(drafts_BG, chosen_BW, num_drafts_B)
        self.draft.observe_round(
            requests,
            RoundStates(
                batch=batch,
                next_ids_target_N=chosen_N,
                aux_hidden_NA=output.aux_hidden_NA,
                final_hidden_ND=(
                    self.target.final_states(output.hidden_ND)
                    if self.draft.needs_final_hidden
                    else None
                ),
                last_rows_B=state.last_rows(shape, requests, num_accepted_B),
            ),
        )
        state.commit(requests, chosen_BW, num_accepted_B)
        if self.has_confidence:
            assert isinstance(self.draft, ConfidentDraft), "it has confidences"
            known_BG = self.draft.confidence_SG.index_select(0, requests.slots_B)
            count = shape.num_drafts
            state.confidence_BG[: shape.batch, :count].copy_(known_BG[:, :count])

    def _choose(
        self,
        requests: RoundRequests,
        batch: PreparedBatch,
        hidden_ND: torch.Tensor,
        drafts_BG: torch.Tensor,
    ) -> torch.Tensor:
        """Return int64 [N], the token at each row: the draft after it where that stays.

        Sync: none (CUDA).
        """
        sampling = requests.sampling
        if sampling is None:
            return self.target.greedy_ids(hidden_ND)
        # Padding rows of a packed round are those of one request more.
        request_N = batch.row_request_N.long().clamp(max=sampling.is_sampled_B.shape[0] - 1)
        position_N = batch.positions_N + 1
        if requests.laws is not None and drafts_BG.shape[1]:
            assert requests.layout is None, "rounds with laws are dense"
            chosen = [
                draw_accepted(
                    self.target.logits(hidden_ND[part]),
                    requests,
                    drafts_BG,
                    rows_M=torch.arange(part.start, part.stop, device=hidden_ND.device),
                )
                for part in row_parts(hidden_ND.shape[0], 16)
            ]
            return torch.cat(chosen)
        chosen = [
            draw_tokens(
                self.target.logits(hidden_ND[part]),
                sampling,
                request_N[part],
                position_N[part],
                TOKEN_DRAW,
            )
            for part in row_parts(hidden_ND.shape[0])
        ]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def row_parts(num_rows: int, size: int = 64) -> list[slice]:
    """Return slices that cover the rows: logits of so many rows exist at once."""
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class RoundRunner(Protocol):
    """Launches rounds without waiting and hands their outcomes over later."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes that it runs, ascending."""

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Drafts per request that it runs, ascending."""

    @property
    def contexts(self) -> tuple[int, ...]:
        """Bounds of positions that it runs, ascending; rounds that draw run with the last only."""

    def packed_row_counts(self, batch: int, num_drafts: int) -> tuple[int, ...]:
        """Return the row counts of its ragged rounds with these sizes, ascending."""

    def launch(self, shape: RoundShape, buffer: int) -> None:
        """Start a round after all device work launched before it.

        Args:
            shape: a combination of the sizes above.
            buffer: 0 or 1, where the outcome goes; what was in it is lost.
        """

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        """Wait for the round launched into a buffer and return its outcome.

        Returns:
            Per request: accepted drafts, then the target's choice at each row of the shape.
        """

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        """Return, after `read` and before the next launch into the buffer, the draft's chances.

        Returns:
            Per request, the chance of each draft of the shape; empty lists without such a head.
        """


def context_buckets(max_length: int, *, first: int = 256) -> tuple[int, ...]:
    """Return the context sizes that have shapes of their own: doubling, the last is `max_length`.

    Args:
        max_length: tokens of a request at most.
        first: the smallest, one attention segment.
    """
    sizes: list[int] = []
    size = first
    while size < max_length:
        sizes.append(size)
        size *= 2
    return (*sizes, max_length)


def batch_sizes(buckets: Sequence[int], max_num_requests: int) -> tuple[int, ...]:
    """Return the batch sizes that have shapes of their own; the last is `max_num_requests`."""
    return (*sorted({size for size in buckets if size < max_num_requests}), max_num_requests)
