"""Which rows are padding, and which counts of ids are of one vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.contract.padding_rows import (
    MAX_PADDING_ROWS,
    has_token_rows,
    is_padding_apart,
    misses_row,
    num_token_rows,
)


@pytest.mark.parametrize(
    ("stored", "rows", "entries", "expected"),
    [
        (64, 72, 64, True),
        (72, 64, 64, True),
        (63, 72, 64, False),
        (64, 72, None, False),
        (72, 72, None, True),
        (64, 60, 64, False),
        (64, 64 + MAX_PADDING_ROWS, 64, True),
        (64, 65 + MAX_PADDING_ROWS, 64, False),
    ],
)
def test_counts_that_differ_in_padding(
    stored: int, rows: int, entries: int | None, expected: bool
) -> None:
    assert is_padding_apart(stored, rows, entries) is expected


@given(
    stored=st.integers(1, 3000),
    rows=st.integers(1, 3000),
    entries=st.none() | st.integers(1, 3000),
)
def test_what_validates_has_every_row_that_is_looked_up(
    stored: int, rows: int, entries: int | None
) -> None:
    if is_padding_apart(stored, rows, entries):
        assert has_token_rows(stored, rows, entries)
        assert num_token_rows(rows, entries) <= min(stored, rows)
        assert not misses_row(stored, stored + 1, num_token_rows(rows, entries) - 1)


@pytest.mark.parametrize(
    ("stored", "num_ids", "highest", "expected"),
    [(24, 24, 63, False), (64, 24, 63, False), (64, 24, 64, True)],
)
def test_a_row_for_each_draft_id_or_for_each_target_id(
    stored: int, num_ids: int, highest: int, expected: bool
) -> None:
    assert misses_row(stored, num_ids, highest) is expected
