"""The shape key of a round: what a captured graph is made for and looked up by.

Shapes include slot geometry, not only token counts: two rounds with equal rows but another draft
width are different graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.batch import RoundKind


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    """Identity of one round shape.

    Args:
        batch_bucket: requests, rounded up to a bucket.
        num_speculative_tokens: gamma of the round, 0 for target-only decoding.
        draft_width: slots in one draft forward.
        verify_width: gamma + 1.
        layout: `dense` when all requests verify the same width, else `ragged`.
        kind: how tokens are chosen; `general` where only the eager path can.
    """

    batch_bucket: int
    num_speculative_tokens: int
    draft_width: int
    verify_width: int
    layout: Literal["dense", "ragged"]
    kind: RoundKind | Literal["general"] = "greedy"


def batch_bucket(num_requests: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `num_requests`; the number itself beyond the last."""
    return next((bucket for bucket in sorted(buckets) if bucket >= num_requests), num_requests)


def round_key(
    num_drafts: Sequence[int],
    *,
    draft_width: int,
    batch_buckets: Sequence[int],
    kind: RoundKind | None = "greedy",
) -> GraphKey:
    """Return the key of a round that verifies `num_drafts[i]` drafts of request i.

    Args:
        num_drafts: per decoding request, at least one request.
        draft_width: slots in one draft forward; 0 for a proposer without a draft model.
        batch_buckets: batch sizes that have their own shape.
        kind: of the round; None: the eager path alone runs it.
    """
    gamma = max(num_drafts)
    return GraphKey(
        batch_bucket=batch_bucket(len(num_drafts), batch_buckets),
        num_speculative_tokens=gamma,
        draft_width=draft_width if gamma else 0,
        verify_width=gamma + 1,
        layout="dense" if min(num_drafts) == gamma else "ragged",
        kind=kind or "general",
    )
