"""Rows of attention that share programs, and segments that the last program combines.

Under the interpreter; see `interpreted.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from functools import partial
from typing import Any

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.kernels.attention import paged_attention_twin
from runtime.kernels.cuda import attention, kv_write, norm, rope
from runtime.spec.packing import row_tiles
from tests.kernels.dense import dense_requests
from tests.kernels.ladder import PagedRequests, paged_requests, plain, same_bits
from tests.kernels.references import HALF_ULP

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

DTYPES = [torch.float32, torch.float16]


def tiled(batch: PreparedBatch) -> PreparedBatch:
    """Add the row tiles that a packed batch has."""
    tiles = row_tiles(batch.row_request_N.tolist())
    return dataclasses.replace(batch, tiles_U2=torch.tensor(tiles, dtype=torch.int32))


def requests_of(dtype: torch.dtype, *, num_kv_heads: int, head_dim: int) -> PagedRequests:
    return paged_requests(
        num_kv_heads=num_kv_heads, head_dim=head_dim, kv_block_size=16, lengths=(37, 3, 530),
        dtype=dtype, seed=1, write=kv_write.launch_write_kv, fill=plain,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "dtype"),
    [
        (6, 2, 16, None, torch.float16),
        (6, 2, 16, 270, torch.float32),
        (20, 1, 8, None, torch.float32),
        (20, 1, 8, 5, torch.float16),
    ],
)
def test_a_prefill_s_rows_are_the_rows_of_a_decode(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    requests = requests_of(dtype, num_kv_heads=num_kv_heads, head_dim=head_dim)
    # A chunk from 0 on, a single row, and a chunk across two segments' ends.
    rows = [(0, p) for p in range(18)] + [(1, 2)] + [(2, p) for p in (255, 256, 511, 512)]
    batch = requests.batch(rows)
    q = plain(len(rows), num_heads, head_dim, seed=2, dtype=dtype)
    shared = {"scale": 0.3, "window": window}
    single = attention.launch_paged_attention(q, requests.layer, batch, **shared)
    together = attention.launch_paged_attention(q, requests.layer, tiled(batch), **shared)
    assert same_bits(together, single)
    for some in (batch, tiled(batch)):
        in_turn = attention.launch_paged_attention(q, requests.layer, some, in_turn=True, **shared)
        assert same_bits(in_turn, single)
    twin = paged_attention_twin(q, requests.layer, batch, **shared)
    atol = 5e-6 + 2 * HALF_ULP[dtype]
    torch.testing.assert_close(together, twin, rtol=2 * HALF_ULP[dtype], atol=atol)


def test_row_tiles_cover_the_rows_of_a_batch_in_order() -> None:
    tiles = row_tiles([0] * 37 + [1] + [2] * 6 + [0] * 2)
    assert tiles == [(0, 16), (16, 16), (32, 5), (37, 1), (38, 6), (44, 2)]
    assert row_tiles([]) == []


def test_partials_of_a_long_prefill_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(torch.float32, num_kv_heads=1, head_dim=16)
    rows = [(2, p) for p in range(490, 530)]
    batch = tiled(requests.batch(rows))
    q = plain(len(rows), 2, 16, seed=2, dtype=torch.float32)
    whole = attention.launch_paged_attention(q, requests.layer, batch, scale=0.25)
    monkeypatch.setattr(attention, "_PARTIAL_BYTES", 1)
    cut = attention.launch_paged_attention(q, requests.layer, batch, scale=0.25)
    assert same_bits(cut, whole)


def test_counters_of_arrivals_are_left_at_zero() -> None:
    dense = dense_requests(
        num_heads=4, num_kv_heads=2, head_dim=16, width=3, lengths=(258, 530, 7),
        dtype=torch.float32,
    )  # fmt: skip
    counters = torch.zeros(64, dtype=torch.int32)
    counted = dataclasses.replace(
        dense, batch=dataclasses.replace(dense.batch, arrivals_X=counters)
    )
    _, expected = dense.attend_separately(attention, rope, kv_write, window=None)
    for _ in range(2):
        _, found = counted.attend(attention.launch_paged_attention, window=None)
        assert same_bits(found, expected)
        assert not bool(counters.any())


@pytest.mark.parametrize("width", [1, 4, 9])
def test_old_keys_and_new_ones_meet_in_one_step(width: int) -> None:
    """The pool is poisoned behind the old keys, so a key read before it is written would show."""
    dense = dense_requests(
        num_heads=4, num_kv_heads=2, head_dim=16, width=width, lengths=(width, 17, 256, 260),
        dtype=torch.float32,
    )  # fmt: skip
    layer, found = dense.attend(attention.launch_paged_attention, window=None)
    other, expected = dense.attend_separately(attention, rope, kv_write, window=None)
    assert same_bits(found, expected)
    assert bool(found.isfinite().all())
    assert same_bits(layer.k.nan_to_num(9.0), other.k.nan_to_num(9.0))
    assert same_bits(layer.v.nan_to_num(9.0), other.v.nan_to_num(9.0))


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("width", [1, 9])
def test_one_program_takes_all_segments_with_the_bits_of_many(
    width: int, window: int | None, head_dim: int
) -> None:
    """Verifies that end a segment, begin one, and lie across two; a window that hides the first."""
    dense = dense_requests(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, width=width,
        lengths=(width, 256, 260, 264, 530), dtype=torch.float32,
    )  # fmt: skip
    split, in_turn = (
        partial(attention.launch_paged_attention, in_turn=choice) for choice in (False, True)
    )
    layer, found = dense.attend(in_turn, window=window)
    other, expected = dense.attend(split, window=window)
    assert same_bits(found, expected)
    assert bool(found.isfinite().all())
    assert same_bits(layer.k.nan_to_num(9.0), other.k.nan_to_num(9.0))
    assert same_bits(layer.v.nan_to_num(9.0), other.v.nan_to_num(9.0))


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_parts_that_are_loaded_together_are_folded_in_turn(
    count: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that no program wrote hold NaN: those of padding rows, and before or behind a row's."""
    segment, empty = 64, torch.Tensor.new_empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        found = empty(*args, **options)
        return found.fill_(math.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    dense = dense_requests(
        num_heads=3, num_kv_heads=1, head_dim=16, width=3,
        lengths=(count * segment, (count - 1) * segment + 1, 70, 5), dtype=torch.float32,
    )  # fmt: skip
    split, in_turn = (
        partial(attention.launch_paged_attention, segment=segment, in_turn=choice)
        for choice in (False, True)
    )
    _, found = dense.attend(split, window=window)
    _, expected = dense.attend(in_turn, window=window)
    assert same_bits(found, expected)
    for request in range(4):
        _, alone = dense.request(request, 3).attend(split, window=window)
        assert same_bits(alone, found[3 * request : 3 * request + 3])
    _, twin = dense.attend_separately(None, None, None, window=window)
    torch.testing.assert_close(found, twin, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "width"), [(6, 2, 24, 1), (4, 1, 32, 5)]
)
def test_norms_inside_attention_have_the_bits_of_norms_beside_it(
    num_heads: int, num_kv_heads: int, head_dim: int, width: int, dtype: torch.dtype
) -> None:
    dense = dense_requests(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, width=width,
        lengths=(width, 260), dtype=dtype, has_norms=True,
    )  # fmt: skip
    layer, found = dense.attend(attention.launch_paged_attention, window=None)
    other, expected = dense.attend_separately(attention, rope, kv_write, norm, window=None)
    assert same_bits(found, expected)
    assert same_bits(layer.k.nan_to_num(9.0), other.k.nan_to_num(9.0))
    _, alone = dense.request(1, 1).attend(attention.launch_paged_attention, window=None)
    assert same_bits(alone, found[width : width + 1])
    _, twin = dense.attend_separately(None, None, None, window=None)
    atol = 5e-6 + 4 * HALF_ULP[dtype]
    torch.testing.assert_close(found, twin, rtol=4 * HALF_ULP[dtype], atol=atol)


@pytest.mark.parametrize("segment", [64, 128, 512])
def test_another_segment_gives_the_same_attention_in_another_order(segment: int) -> None:
    """Benchmarks without the contract take other segments; the function computed is the same."""
    requests = requests_of(torch.float32, num_kv_heads=2, head_dim=16)
    rows = [(0, 36), (1, 2), (2, 529)]
    batch = requests.batch(rows)
    q = plain(len(rows), 6, 16, seed=2, dtype=torch.float32)
    out = attention.launch_paged_attention(q, requests.layer, batch, scale=0.3, segment=segment)
    twin = paged_attention_twin(q, requests.layer, batch, scale=0.3)
    torch.testing.assert_close(out, twin, rtol=1e-5, atol=5e-6)
