"""Which rows of a table over target ids are padding: one rule for `validate`, `manifest` and load.

Rows beyond the tokenizer's entries only pad a matrix. The target never chooses such an id and no
draft proposes one, so tables that differ in them alone belong to the same vocabulary. Without a
tokenizer nothing tells padding from tokens, and every row counts as a token's.
*Source:* `pad_to_multiple_of` of transformers' `resize_token_embeddings`, and vLLM's vocabularies,
which are padded to multiples of 64.
"""

from __future__ import annotations

MAX_PADDING_ROWS = 1024
"""Rows are padded to multiples of at most this; counts further apart are of other vocabularies."""


def num_token_rows(rows: int, tokenizer_size: int | None) -> int:
    """Return how many of a target's rows are tokens; only those ids can be chosen or drafted.

    Args:
        rows: of the target's embedding.
        tokenizer_size: entries of its tokenizer, None when there is none.
    """
    return rows if tokenizer_size is None else min(rows, tokenizer_size)


def has_token_rows(stored: int, rows: int, tokenizer_size: int | None) -> bool:
    """Tell whether a draft's table of `stored` rows has one for each token of the target.

    Args:
        stored: rows of the draft's table over target ids.
        rows: as in `num_token_rows`.
        tokenizer_size: as in `num_token_rows`.
    """
    return stored >= num_token_rows(rows, tokenizer_size)


def misses_row(stored: int, num_ids: int, highest: int) -> bool:
    """Tell whether a table lacks the row of an id that a map reaches.

    Args:
        stored: rows of a table with a row for each draft id, or for each target id.
        num_ids: entries of the map.
        highest: the highest target id among them.
    """
    return stored != num_ids and highest >= stored


def is_padding_apart(stored: int, rows: int, tokenizer_size: int | None) -> bool:
    """Tell whether a draft's count of target ids and the target's differ in padding alone.

    Args:
        stored: target ids that the draft counts.
        rows: as in `num_token_rows`.
        tokenizer_size: as in `num_token_rows`.
    """
    if tokenizer_size is None or tokenizer_size > rows:
        return stored == rows
    return abs(stored - rows) <= MAX_PADDING_ROWS and has_token_rows(stored, rows, tokenizer_size)
