"""Counters of an engine, and the definitions behind its metrics.

Accept length = 1 + accepted drafts / verify rounds: drafts are counted before any stop or length
cut, and the token that a prefill yields belongs to no round. Acceptance at position j = rounds
whose draft j was accepted / all rounds, rounds without drafts included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.engine.request import FinishReason, accept_length
from runtime.graphs.capture import GraphReport
from runtime.graphs.key import GraphKey
from runtime.spec.types import RoundResult


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot; counts are since start-up or the last flush.

    Args:
        num_kv_blocks: blocks that requests can hold.
        num_free_kv_blocks: blocks that no request holds (some may still be findable prefixes).
        num_cached_kv_blocks: blocks that a later prompt could find.
        num_steps: target forwards.
        num_rows: rows of those forwards.
        num_prompt_tokens: prompt tokens of admitted requests.
        num_cached_tokens: of these, tokens whose KV came from the prefix cache.
        num_output_tokens: tokens kept.
        num_accepted_at: per draft position, rounds in which that draft was accepted.
        rounds_by_key: steps with at least one verify round, by the shape of their rounds.
        finished: requests ended, by reason.
        num_device_rounds: steps whose round ran on the device without host reads; the others ran
            kernel by kernel.
        graphs: captured graphs and what they cost; not cleared by a flush.
        rounds_by_drafts: rounds of requests, by how many drafts counted in them.
    """

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    num_preemptions: int
    num_steps: int
    num_rows: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_rounds: int
    num_drafts: int
    num_accepted_drafts: int
    num_accepted_at: tuple[int, ...]
    rounds_by_key: Mapping[GraphKey, int]
    finished: Mapping[FinishReason, int]
    num_device_rounds: int = 0
    graphs: GraphReport = field(default_factory=GraphReport)
    rounds_by_drafts: Mapping[int, int] = field(default_factory=dict)

    @property
    def accept_length(self) -> float | None:
        """Of all rounds; None before the first."""
        return accept_length(self.num_accepted_drafts, self.num_rounds)

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Per draft position, the share of all rounds in which that draft was accepted."""
        return tuple(count / self.num_rounds for count in self.num_accepted_at if self.num_rounds)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by running requests, 0 to 1."""
        return 1 - self.num_free_kv_blocks / self.num_kv_blocks


class Tally:
    """The counting side of `EngineStats`."""

    def __init__(self, num_speculative_tokens: int) -> None:
        """Start at zero."""
        self.num_steps = 0
        self.num_rows = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_rounds = 0
        self.num_drafts = 0
        self.num_accepted_at = [0] * num_speculative_tokens
        self.rounds_by_key: Counter[GraphKey] = Counter()
        self.rounds_by_drafts: Counter[int] = Counter()
        self.finished: Counter[FinishReason] = Counter()
        self.num_device_rounds = 0

    def count_step(self, *, num_rows: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count one target forward and the requests that it admitted."""
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def count_rounds(self, result: RoundResult, key: GraphKey, *, num_rounds: int) -> None:
        """Count the first `num_rounds` entries of a verify; the rest are prefill tokens."""
        self.num_rounds += num_rounds
        self.num_drafts += sum(result.num_drafts[:num_rounds])
        self.rounds_by_key[key] += 1
        self.rounds_by_drafts.update(result.num_drafts[:num_rounds])
        for num_accepted in result.num_accepted_drafts[:num_rounds]:
            for position in range(num_accepted):
                self.num_accepted_at[position] += 1

    def snapshot(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_preemptions: int,
        num_kv_blocks: int,
        num_free_kv_blocks: int,
        num_cached_kv_blocks: int,
        graphs: GraphReport,
    ) -> EngineStats:
        """Return the counts with the state of queues, blocks and graphs, which others own."""
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_kv_blocks=num_kv_blocks,
            num_free_kv_blocks=num_free_kv_blocks,
            num_cached_kv_blocks=num_cached_kv_blocks,
            num_preemptions=num_preemptions,
            num_steps=self.num_steps,
            num_rows=self.num_rows,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_rounds=self.num_rounds,
            num_drafts=self.num_drafts,
            num_accepted_drafts=sum(self.num_accepted_at),
            num_accepted_at=tuple(self.num_accepted_at),
            rounds_by_key=dict(self.rounds_by_key),
            finished=dict(self.finished),
            num_device_rounds=self.num_device_rounds,
            graphs=graphs,
            rounds_by_drafts=dict(sorted(self.rounds_by_drafts.items())),
        )
