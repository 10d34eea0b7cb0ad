"""What a map's size is worth: bytes of the head that are not read against drafts that are lost.

Model, in words as the report prints it: a round reads the draft once for each of its passes (the
head's rows of the map, and the rest) and the target once; each byte costs 1 / bandwidth, and each
layer a fixed time. A draft is accepted at a position with probability
acceptance * (1 - lost ratio * (1 - coverage)), each position like the others, so a round commits
1 + sum of its powers. The lost ratio says how often a full head is accepted at the tokens that the
map loses, against all tokens: 1 is the bound that holds when nothing is known; rare tokens are
drafted worse. Speed is tokens for each second.
Exactness: none; this is an estimate and every number in it is printed with where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

NEAR_BEST = 0.995
MODEL = (
    "tokens of a round / seconds of a round; tokens = 1 + sum over i = 1..drafts of "
    "(acceptance * (1 - lost ratio * (1 - coverage)))^i; seconds = (passes * "
    "(head rows * row bytes + other draft bytes) + target bytes) / bandwidth "
    "+ layers run * layer overhead"
)

Fact = Literal[
    "head_row_bytes",
    "draft_bytes",
    "draft_layers",
    "target_bytes",
    "target_layers",
    "num_speculative_tokens",
    "is_block",
    "acceptance",
    "lost_ratio",
    "bandwidth",
    "layer_overhead_s",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFacts:
    """What the model multiplies.

    Args:
        target_vocab_size: rows of the full head.
        head_row_bytes: bytes of one row of the head the draft reads.
        draft_bytes: bytes of the draft that one pass reads, without its head.
        draft_layers: layers that one pass runs.
        target_bytes: bytes of the target that a verification reads, its head included.
        target_layers: its layers.
        num_speculative_tokens: drafts of a round.
        is_block: one forward of the draft makes all drafts of a round; false: one for each.
        acceptance: probability that a draft is accepted at a position that is reached, full head.
        lost_ratio: acceptance at tokens outside the map, full head, over that at all tokens.
        bandwidth: bytes for each second.
        layer_overhead_s: time of a layer that does not depend on bytes.
        origins: fact -> where its number came from.
    """

    target_vocab_size: int
    head_row_bytes: float
    draft_bytes: float
    draft_layers: int
    target_bytes: float
    target_layers: int
    num_speculative_tokens: int
    is_block: bool
    acceptance: float
    lost_ratio: float
    bandwidth: float
    layer_overhead_s: float
    origins: Mapping[Fact, str]

    @property
    def num_draft_passes(self) -> int:
        """Forwards of the draft in a round."""
        return 1 if self.is_block else self.num_speculative_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeEstimate:
    """What the model says about one size.

    Args:
        size: ids in the map.
        coverage: share of the target's tokens inside it.
        accepted_drafts: expected accepted drafts of a round.
        draft_s: seconds of all draft passes of a round.
        round_s: seconds of a round.
        speedup: tokens for each second against the full head.
        head_bytes: bytes of the head that one pass reads.
    """

    size: int
    coverage: float
    accepted_drafts: float
    draft_s: float
    round_s: float
    speedup: float
    head_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeChoice:
    """The size of highest estimated speed.

    Args:
        best: its estimate.
        near_low: smallest size whose speed is within `NEAR_BEST` of it, without a slower one in
            between.
        near_high: the largest such size.
    """

    best: SizeEstimate
    near_low: int
    near_high: int


def accepted_drafts(acceptance: float, num_speculative_tokens: int) -> float:
    """Return the expected accepted drafts of a round."""
    return sum(acceptance**position for position in range(1, num_speculative_tokens + 1))


def estimate(facts: CostFacts, size: int, coverage: float) -> SizeEstimate:
    """Return what the model says about a map of `size` ids with this coverage, 0..1."""
    full_s = _round_s(facts, facts.target_vocab_size)
    full = (1 + accepted_drafts(facts.acceptance, facts.num_speculative_tokens)) / full_s
    kept = 1 - facts.lost_ratio * (1 - coverage)
    accepted = accepted_drafts(facts.acceptance * kept, facts.num_speculative_tokens)
    round_s = _round_s(facts, size)
    return SizeEstimate(
        size=size,
        coverage=coverage,
        accepted_drafts=accepted,
        draft_s=_draft_s(facts, size),
        round_s=round_s,
        speedup=(1 + accepted) / round_s / full,
        head_bytes=int(size * facts.head_row_bytes),
    )


def _draft_s(facts: CostFacts, size: int) -> float:
    read_s = (size * facts.head_row_bytes + facts.draft_bytes) / facts.bandwidth
    return facts.num_draft_passes * (read_s + facts.draft_layers * facts.layer_overhead_s)


def _round_s(facts: CostFacts, size: int) -> float:
    verify_s = facts.target_bytes / facts.bandwidth + facts.target_layers * facts.layer_overhead_s
    return _draft_s(facts, size) + verify_s


def best_size(
    facts: CostFacts, sizes: tuple[int, ...], coverage: Callable[[int], float]
) -> SizeChoice:
    """Return the fastest of `sizes`, the smallest of equally fast ones.

    Args:
        facts: of the model.
        sizes: ascending, at least one.
        coverage: of a map of a size.
    """
    estimates = [estimate(facts, size, coverage(size)) for size in sizes]
    speeds = [item.speedup for item in estimates]
    best = max(range(len(sizes)), key=lambda index: (speeds[index], -index))
    low = high = best
    enough = speeds[best] * NEAR_BEST
    while low > 0 and speeds[low - 1] >= enough:
        low -= 1
    while high < len(sizes) - 1 and speeds[high + 1] >= enough:
        high += 1
    return SizeChoice(best=estimates[best], near_low=sizes[low], near_high=sizes[high])
