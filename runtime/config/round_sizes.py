"""The sizes that rounds come in: what is captured, what costs are measured for, what is chosen.

Legend: B requests, G drafts, N verified rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROW_BIN = 8
"""Verified rows (tokens) that share one entry of a cost table."""
_SMALL_COUNTS = (0, 1, 2, 3, 4, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSize:
    """A size that a round may have.

    Args:
        batch: requests, padding included.
        num_drafts: drafts that the draft model makes for each request.
        num_rows: rows that the target verifies; batch * (num_drafts + 1) when dense.
    """

    batch: int
    num_drafts: int
    num_rows: int

    @property
    def is_dense(self) -> bool:
        """Whether every request has num_drafts + 1 rows."""
        return self.num_rows == self.batch * (self.num_drafts + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundMenu:
    """The sizes of one engine.

    Args:
        batches: ascending.
        draft_counts: ascending.
    """

    batches: tuple[int, ...]
    draft_counts: tuple[int, ...]

    def batch_of(self, num_requests: int) -> int:
        """Return the smallest batch that holds `num_requests`; the number itself beyond all."""
        return next((size for size in self.batches if size >= num_requests), num_requests)

    def sizes(self, num_requests: int) -> tuple[RoundSize, ...]:
        """Return every size for that many requests, fewest drafts and then fewest rows first."""
        batch = self.batch_of(num_requests)
        return tuple(
            RoundSize(batch=batch, num_drafts=count, num_rows=num_rows)
            for count in self.draft_counts
            for num_rows in (*packed_row_counts(batch, count), batch * (count + 1))
        )


def draft_counts_up_to(num_speculative_tokens: int) -> tuple[int, ...]:
    """Return the draft counts that an adaptive engine chooses among; the last is the trained one.

    0 to 4 one by one, then 6, 8 and every fourth: the gain of one more draft shrinks, and each
    count costs captured graphs.
    """
    counts = {count for count in _SMALL_COUNTS if count < num_speculative_tokens}
    counts |= set(range(8, num_speculative_tokens, 4))
    return (*sorted(counts), num_speculative_tokens)


def packed_row_counts(batch: int, num_drafts: int) -> tuple[int, ...]:
    """Return the row counts of ragged rounds: quarters of the dense count in whole bins.

    A single request has none: its ragged round is the dense one with fewer drafts.
    """
    if batch == 1:
        return ()
    dense = batch * (num_drafts + 1)
    quarters = {-(-dense * part // (4 * ROW_BIN)) * ROW_BIN for part in (1, 2, 3)}
    return tuple(sorted(count for count in quarters if batch < count < dense))


def smallest_fit(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the first of ascending sizes that is at least `wanted`; None beyond the last."""
    return next((size for size in sizes if size >= wanted), None)
