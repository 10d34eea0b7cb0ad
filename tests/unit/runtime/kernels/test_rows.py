"""The arithmetic under the twins: trees, exponentials and padding that ignore placement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.rows import ROW_TILE, fixed_exp, pad_rows, tree_sum


@settings(deadline=None, max_examples=60)
@given(width=st.integers(1, 700), num_rows=st.integers(1, 40), seed=st.integers(0, 1000))
def test_tree_sum_of_a_row_ignores_other_rows(width: int, num_rows: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=gen) * 1e3
    kept = x.clone()
    sums = tree_sum(x)
    assert torch.equal(x, kept)
    row = seed % num_rows
    assert torch.equal(tree_sum(x[row : row + 1]), sums[row : row + 1])
    exact = math.fsum(x[row].tolist())
    # A tree of depth d loses at most d half ulps of the absolute sum.
    allowed = math.ceil(math.log2(width) + 1) * 2.0**-24 * float(x[row].double().abs().sum())
    assert abs(float(sums[row]) - exact) <= allowed


@settings(deadline=None, max_examples=60)
@given(count=st.integers(1, 300), place=st.integers(0, 40_000), seed=st.integers(0, 1000))
def test_fixed_exp_of_a_value_ignores_its_place(count: int, place: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=gen) * 20
    wide = torch.zeros(place + count + seed)
    wide[place : place + count] = values
    alone = fixed_exp(values)
    assert torch.equal(fixed_exp(wide)[place : place + count], alone)
    torch.testing.assert_close(alone.double(), values.double().exp(), rtol=1e-6, atol=1e-38)


def test_fixed_exp_of_special_values_keeps_its_argument() -> None:
    x = torch.tensor([float("-inf"), 0.0, -0.0, float("inf"), -200.0])
    kept = x.clone()
    assert fixed_exp(x).tolist() == [0.0, 1.0, 1.0, float("inf"), 0.0]
    assert torch.equal(x, kept)
    aligned = torch.zeros(128)
    assert torch.equal(fixed_exp(aligned), torch.ones(128))
    assert torch.equal(aligned, torch.zeros(128))


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 32])
def test_pad_rows(num_rows: int) -> None:
    x = torch.randn(num_rows, 5)
    padded = pad_rows(x)
    assert padded.shape[0] % ROW_TILE == 0
    assert padded.shape[0] - num_rows < ROW_TILE
    assert torch.equal(padded[:num_rows], x)
    assert not padded[num_rows:].any()
    assert padded.data_ptr() % 64 == 0
