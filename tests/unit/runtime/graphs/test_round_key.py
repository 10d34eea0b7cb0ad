"""Shape keys of rounds."""

from __future__ import annotations

import pytest

from runtime.graphs.key import GraphKey, batch_bucket, round_key


@pytest.mark.parametrize(("requests", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (9, 9)])
def test_bucket_is_the_smallest_that_holds_the_batch(requests: int, bucket: int) -> None:
    assert batch_bucket(requests, (8, 1, 4)) == bucket


def test_equal_widths_are_dense_and_others_ragged() -> None:
    dense = round_key((3, 3), draft_width=1, batch_buckets=(2,))
    assert dense == GraphKey(
        batch_bucket=2, num_speculative_tokens=3, draft_width=1, verify_width=4, layout="dense"
    )
    ragged = round_key((3, 0), draft_width=1, batch_buckets=(2,))
    assert ragged.layout == "ragged"
    assert ragged != dense


def test_a_round_without_drafts_runs_no_draft() -> None:
    plain = round_key((0,), draft_width=1, batch_buckets=(1,))
    assert (plain.num_speculative_tokens, plain.draft_width, plain.verify_width) == (0, 0, 1)
