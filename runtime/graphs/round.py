"""A whole round as one function of device tensors: draft, verify, accept, commit, observe.

Nothing here reads the device from the host, so the function may be captured; run eagerly it is the
readable twin of the captured round and serves the CPU. It gives the tokens and the draft state of
`runtime.engine.round` bit for bit: the same rows with the same positions, beside other rows.

Requests with a grammar run the same round in two halves (`run_drafts`, then `run`), between which
the host makes masks from the drafts (`runtime.graphs.split`).

Rows beyond a request's drafts and beyond the accepted ones are computed and ignored: they write
keys and values only where the next round writes before it reads. Rows of padding requests sit in
the padding slot and write to block 0.

Legend: B requests, G drafts, W = G + 1 rows of each request, N = B W rows; M rows of a part of
them, V target ids, X words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from runtime.batch import (
    ConfidentDraft,
    PrefillDraft,
    PreparedBatch,
    RoundDraft,
    RoundRequests,
    RoundStates,
    packed,
)
from runtime.graphs.prefill import PrefillRows, PrefillShape, PrefillState
from runtime.graphs.split import SplitState
from runtime.graphs.state import RoundShape, RoundState
from runtime.kernels.draw import draw_accepted, draw_tokens
from runtime.kernels.law import MASKED, comparable
from runtime.kernels.masks import drafts_before_faults, row_faults, unpack_mask
from runtime.kernels.noise import TOKEN_DRAW
from runtime.kernels.row_copies import take_rows
from runtime.kv import KVLayer
from runtime.models import TargetModel, TargetOutput


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


@runtime_checkable
class SparseDraft(Protocol):
    """A draft that may have fewer drafts of a request than a round has room for.

    Attributes:
        num_found_S: int64, drafts that the newest round of a slot has; what is proposed beyond
            them does not count.
    """

    num_found_S: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceRound:
    """The round of one engine: its models, caches and state.

    Args:
        target: the model that verifies.
        target_kv: its layers of the pool.
        draft: who drafts.
        state: what rounds read and write.
        split: what rounds of requests with a grammar read and write besides; None: there are none.
        prefill: what prefills read and write; None: there are none.
        forced: in a benchmark of forced lengths, with dense rounds; None: the target decides.
    """

    target: TargetModel
    target_kv: Sequence[KVLayer]
    draft: RoundDraft
    state: RoundState
    split: SplitState | None = None
    prefill: PrefillState | None = None
    forced: LengthSchedule | None = None

    @property
    def has_confidence(self) -> bool:
        """Whether the draft says how sure it is of its drafts."""
        return isinstance(self.draft, ConfidentDraft) and self.draft.has_confidence

    @property
    def is_sparse(self) -> bool:
        """Whether the draft may have fewer drafts than a round has room for."""
        return isinstance(self.draft, SparseDraft)

    def draft_phase(self, shape: RoundShape) -> None:
        """Run the draft phase of `run` alone, to time it.

        Sync: none (CUDA).
        """
        self.draft.draft_round(self.state.requests(shape))

    def run(self, shape: RoundShape) -> None:
        """Run one round of the requests in `state.slots_B[:shape.batch]`.

        Reads and advances `state`, the caches and the draft's own state; the outcome is in
        `state.output_BX`. Of a split shape it is the second half of the round of the requests in
        `split.slots_B`; an outcome below 0 there is the fault of a row, negated.

        Exactness: the tokens are the target's choices; padding alters no request.
        Sync: none (CUDA).
        """
        if not shape.is_split:
            requests = self.state.requests(shape)
            self.draft.draft_round(requests)
            self._verify(shape, requests)
            return
        assert self.split is not None, "a split round has a state of its own"
        requests = self.split.requests(shape)
        self.split.restore(shape, requests)
        self._verify(shape, requests, self.split.words(shape))

    def run_drafts(self, shape: RoundShape) -> None:
        """Run the first half of a split round: its drafts are in `split.drafts_BG`.

        Sync: none (CUDA).
        """
        assert self.split is not None, "a split round has a state of its own"
        requests = self.split.requests(shape)
        self.draft.draft_round(requests)
        self.split.keep(shape, requests)

    def run_prefill(self, shape: PrefillShape) -> None:
        """Run the rows of the prompts that were written to `prefill`; the output has their tokens.

        The draft takes the rows in, too, so a round may follow.

        Exactness: the bits of the eager prefill; padding alters no request.
        Sync: none (CUDA).
        """
        assert self.prefill is not None, "a prefill has a state of its own"
        assert isinstance(self.draft, PrefillDraft), "the draft takes rows in on the device"
        rows = self.prefill.rows(shape)
        output = self.target.forward(rows.batch, self.target_kv, self.draft.aux_layer_ids)
        chosen_R = self._choose_first(shape, rows, output.hidden_ND)
        self.draft.observe_prefill(
            rows.slots_R,
            RoundStates(
                batch=rows.batch,
                next_ids_target_N=rows.next_ids(chosen_R),
                aux_hidden_NA=output.aux_hidden_NA,
                final_hidden_ND=self._final_states(output.hidden_ND),
                last_rows_B=rows.last_rows_R,
            ),
        )
        self.prefill.output_R[: shape.num_places].copy_(chosen_R)

    def _choose_first(
        self, shape: PrefillShape, rows: PrefillRows, hidden_ND: torch.Tensor
    ) -> torch.Tensor:
        """Return int64 [R], the token after each prompt.

        Sync: none (CUDA).
        """
        if shape.kind == "greedy":
            last_rows = self.target.final_stream(hidden_ND, rows.last_rows_R)
            return self.target.greedy_ids(last_rows)
        has_filters = shape.kind == "filtered"
        return draw_tokens(
            self.target.reachable_logits(self.target.final_stream(hidden_ND, rows.last_rows_R)),
            self.state.sampling.select(rows.slots_R, has_filters=has_filters),
            None,
            rows.batch.positions_N.index_select(0, rows.last_rows_R),
            TOKEN_DRAW,
        )

    def _final_states(self, hidden_ND: torch.Tensor) -> torch.Tensor | None:
        """Return the final-normed states where the draft needs them."""
        return self.target.final_states(hidden_ND) if self.draft.needs_final_hidden else None

    def _verify(
        self,
        shape: RoundShape,
        requests: RoundRequests,
        words_NX: torch.Tensor | None = None,
    ) -> None:
        """Run everything of a round that comes after its drafts, which are in `requests`.

        Sync: none (CUDA).
        """
        state = self.state
        if isinstance(self.draft, SparseDraft) and shape.num_drafts:
            found_B = self.draft.num_found_S.index_select(0, requests.slots_B)
            num_drafts_B = torch.minimum(requests.num_drafts_B, found_B)
            requests = replace(requests, num_drafts_B=num_drafts_B)
            state.num_counted_B[: shape.batch].copy_(num_drafts_B)
        batch = requests.verify_batch()
        output = self.target.forward(batch, self.target_kv, self.draft.aux_layer_ids)
        chosen_N, faults_N = self._choose(requests, batch, output, words_NX)
        chosen_BW = requests.per_request(chosen_N)
        num_drafts_B = requests.num_drafts_B
        if faults_N is not None:
            faults_BW = requests.per_request(faults_N)
            num_drafts_B = drafts_before_faults(num_drafts_B, faults_BW)
        if self.forced is not None:
            num_drafts_B = self.forced.accepted(requests.slots_B, requests.lengths_B, num_drafts_B)
            chosen_BW = self.forced.choose(requests.drafts_BG, chosen_BW, num_drafts_B)
            chosen_N = packed(chosen_BW)
        end = state.finish(shape, requests, chosen_BW, num_drafts_B)
        self.draft.observe_round(
            requests,
            RoundStates(
                batch=batch,
                next_ids_target_N=chosen_N,
                aux_hidden_NA=output.aux_hidden_NA,
                final_hidden_ND=self._final_states(output.hidden_ND),
                last_rows_B=end.last_rows_B,
            ),
        )
        if faults_N is not None:
            told_BW = state.output_BX[: shape.batch, 1 : shape.width + 1]
            faults_BW = requests.per_request(faults_N)
            told_BW.copy_(torch.where(faults_BW > 0, -faults_BW, chosen_BW))
        if self.has_confidence and shape.num_drafts:
            assert isinstance(self.draft, ConfidentDraft), "it has confidences"
            count = shape.num_drafts
            told_BG = state.confidence_BG[: shape.batch, :count]
            take_rows(self.draft.confidence_SG[:, :count], requests.slots_B, out_MD=told_BG)

    def _choose(
        self,
        requests: RoundRequests,
        batch: PreparedBatch,
        output: TargetOutput,
        words_NX: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the token at each row and, with masks, its fault: int64 [N] each.

        The token is the draft after the row where that stays.

        Sync: none (CUDA).
        """
        sampling = requests.sampling
        if sampling is None:
            assert words_NX is None, "rows with masks need logits"
            return self.target.greedy_ids(output.head_rows), None
        hidden_ND, drafts_BG = output.hidden_ND, requests.drafts_BG
        request_N, position_N = batch.row_request_N, batch.positions_N
        is_rejection = requests.laws is not None and drafts_BG.shape[1] > 0
        assert not is_rejection or requests.layout is None, "rounds with laws are dense"
        chosen: list[torch.Tensor] = []
        faults: list[torch.Tensor] = []
        parts = row_parts(hidden_ND.shape[0], 16 if is_rejection else 64)
        for part in parts:
            rows = output.head_rows if len(parts) == 1 else hidden_ND[part]
            if words_NX is None and not is_rejection:
                logits_MV = self.target.reachable_logits(rows)
            else:
                logits_MV = self.target.logits(rows)
            if words_NX is not None:
                logits_MV, faults_M = masked(logits_MV, words_NX[part])
                faults.append(faults_M)
            if is_rejection:
                rows_M = torch.arange(part.start, part.stop, device=hidden_ND.device)
                chosen.append(draw_accepted(logits_MV, requests, drafts_BG, rows_M=rows_M))
            else:
                chosen.append(
                    draw_tokens(logits_MV, sampling, request_N[part], position_N[part], TOKEN_DRAW)
                )
        return joined(chosen), joined(faults) if faults else None


def masked(logits_MV: torch.Tensor, words_MX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 logits without the ids that a mask forbids, and int64 [M] faults of the rows.

    Sync: none.
    """
    allowed_MV = unpack_mask(words_MX, logits_MV.shape[1])
    kept_MV = torch.where(allowed_MV, logits_MV, MASKED)
    return kept_MV, row_faults(logits_MV, comparable(kept_MV))


def joined(parts_M: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts as one tensor."""
    return parts_M[0] if len(parts_M) == 1 else torch.cat(list(parts_M))


def row_parts(num_rows: int, size: int = 64) -> list[slice]:
    """Return slices that cover the rows: logits of so many rows exist at once."""
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


NUM_BUFFERS = 2
"""Whole rounds in flight at most: one runs while the one before it is read."""
SPLIT_BUFFER = NUM_BUFFERS
"""Where outcomes of split rounds go: one is in flight at most."""


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
        """Start a round, or the second half of a split one, after all work launched before it.

        Args:
            shape: a combination of the sizes above; a split one has the most drafts, the last
                context and a kind of `split_kind`.
            buffer: below `NUM_BUFFERS`, or `SPLIT_BUFFER` for a split round: where the outcome
                goes; what was in it is lost.
        """

    def make_ready(self, shape: RoundShape) -> None:
        """Do what a split round needs before it is launched for the first time.

        Every request of `SplitState` is padding afterwards. May wait for the device, once a shape.
        """

    def launch_drafts(self, shape: RoundShape) -> None:
        """Start the first half of a split round with drafts."""

    def read_drafts(self, num_requests: int) -> list[list[int]]:
        """Wait for the half that was launched and return each request's drafts."""

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        """Wait for the round launched into a buffer and return its outcome.

        Returns:
            Per request: accepted drafts, then the target's choice at each row of the shape.
        """

    def counted(self, buffer: int, num_requests: int) -> list[int] | None:
        """Return, at the same time as `confidence`, the drafts of each request that counted.

        None: all that were asked for.
        """

    def settle(self) -> None:
        """Wait until all that was launched has run; outcomes can be read as before."""

    @property
    def prefill_shapes(self) -> Sequence[PrefillShape]:
        """Prefills that it runs."""

    def launch_prefill(self, shape: PrefillShape) -> None:
        """Start the prefill that was written, after all work launched before it."""

    def read_prefill(self, num_prompts: int) -> list[int]:
        """Wait for the prefill that was launched and return the target id of each prompt."""

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        """Return, after `read` and before the next launch into the buffer, the draft's chances.

        Returns:
            Per request, the chance of each draft of the shape; empty lists without such a head.
        """


def context_buckets(max_length: int, *, first: int = 256) -> tuple[int, ...]:
    """Return the context sizes that have shapes of their own: doubling, the last is `max_length`.

    Args:
        max_length: tokens of a request at most.
        first: the smallest, one attention segment or two.
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
