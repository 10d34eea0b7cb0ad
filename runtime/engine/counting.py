"""Counts what rounds did, in the engine's tally and in their requests, and learns from it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.batch import ConfidentDraft, RoundKind
from runtime.config import RuntimeConfig
from runtime.engine.lanes import LaneResult
from runtime.engine.request import Request
from runtime.engine.round import Round
from runtime.engine.scheduler import Plan
from runtime.engine.slot_params import round_kind
from runtime.engine.stats import Tally
from runtime.graphs.key import round_key
from runtime.spec.adaptive import DraftLengths
from runtime.spec.types import Proposer, RoundResult


class RoundCounter:
    """Counts drafts before any stop or length cut."""

    def __init__(self, *, config: RuntimeConfig, proposer: Proposer, lengths: DraftLengths) -> None:
        """Count for one engine; the parts are its own."""
        self._config = config
        self._proposer = proposer
        self._lengths = lengths
        self.tally = Tally(config.num_speculative_tokens)

    def reset(self) -> None:
        """Start at zero."""
        self.tally = Tally(self._config.num_speculative_tokens)

    def count(self, done: Round, plan: Plan) -> None:
        """Count the round before any cut; entries beyond the decodes are prefill tokens."""
        self.tally.count_step(
            num_rows=done.rows.num_rows,
            num_prompt_tokens=sum(request.num_prompt_tokens for request in plan.admitted),
            num_cached_tokens=sum(request.num_cached_tokens or 0 for request in plan.admitted),
        )
        decoding = done.rows.decoding
        if decoding:
            kind = round_kind([request.params for request in decoding])
            self.count_rounds(decoding, done.result, self._confidence(decoding), kind=kind)

    def count_device_round(self, lanes: Sequence[LaneResult], result: RoundResult) -> None:
        """Count a round that ran on the device; `result` is what these lanes yielded."""
        self.tally.count_step(
            num_rows=sum(result.num_drafts) + len(lanes),
            num_prompt_tokens=0,
            num_cached_tokens=0,
        )
        self.tally.num_device_rounds += 1
        self.count_rounds(
            [lane.request for lane in lanes],
            result,
            [lane.confidence for lane in lanes],
            kind=lanes[0].kind,
        )

    def count_rounds(
        self,
        decoding: Sequence[Request],
        result: RoundResult,
        confidence: Sequence[tuple[float, ...]],
        *,
        kind: RoundKind | None,
    ) -> None:
        """Count rounds of requests that lead the result's, and learn from them."""
        num_rounds = len(decoding)
        key = round_key(
            result.num_drafts[:num_rounds],
            draft_width=self._config.draft_width_of(max(result.num_drafts[:num_rounds], default=0)),
            batch_buckets=self._config.batch_buckets,
            kind=kind,
        )
        self.tally.count_rounds(result, key, num_rounds=num_rounds)
        counts = zip(decoding, result.num_drafts, result.num_accepted_drafts, strict=False)
        for request, num_drafts, num_accepted in counts:
            request.num_rounds += 1
            request.num_drafts += num_drafts
            request.num_accepted_drafts += num_accepted
        if self._config.length_mode == "static":
            return
        for request, num_drafts, num_accepted, chances in zip(
            decoding, result.num_drafts, result.num_accepted_drafts, confidence, strict=False
        ):
            self._lengths.observe(
                request.acceptance,
                num_drafts=num_drafts,
                num_accepted=num_accepted,
                confidence=chances,
            )

    def _confidence(self, decoding: Sequence[Request]) -> list[tuple[float, ...]]:
        """Return the draft's chances for the drafts that were just verified.

        Sync: reads them where draft counts are chosen.
        """
        draft = self._proposer
        if self._config.length_mode == "static" or not isinstance(draft, ConfidentDraft):
            return [()] * len(decoding)
        if not draft.has_confidence:
            return [()] * len(decoding)
        slots = [request.placed.slot for request in decoding]
        return [tuple(row) for row in draft.confidence_SG[slots].tolist()]
