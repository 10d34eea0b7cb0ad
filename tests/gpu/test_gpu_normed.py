"""Norms inside heads, joined halves and attention, on a GPU."""

from __future__ import annotations

import pytest
import torch

from runtime import kernels
from runtime.kernels.cuda import attention, joined_linear, kv_write, norm, rope
from runtime.kernels.head import head_logits_twin
from runtime.kernels.joined_linear import RowHalf, joined_linear_twin
from runtime.kernels.norm import RowNorm
from tests.kernels.dense import dense_requests
from tests.kernels.ladder import (
    SOME_COUNTS,
    adversarial,
    assert_rows_independent,
    differing,
    plain,
    same_bits,
)
from tests.kernels.references import HALF_ULP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
NUM_ROWS = 64


def norm_of(width: int, dtype: torch.dtype, *, seed: int) -> RowNorm:
    return RowNorm(weight_D=1 + plain(width, seed=seed, dtype=dtype, device=DEVICE) / 4, eps=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "columns"), [(576, 49_152), (2048, 32_768), (4096, 151_936)])
def test_a_normed_head(width: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, width, seed=1, dtype=dtype, device=DEVICE)
    weight = plain(columns, width, seed=2, dtype=dtype, device=DEVICE)
    own = norm_of(width, dtype, seed=3)
    logits = kernels.head_logits(x, weight, own)
    ids, best = kernels.head_argmax(x, weight, own)
    assert same_bits(best, logits.amax(dim=1))
    for count in (1, 5, 16, 17, 40):
        few_ids, few_best = kernels.head_argmax(x[:count], weight, own)
        assert same_bits(few_best, best[:count]), f"M={count}: {differing(few_best, best[:count])}"
        assert torch.equal(few_ids, ids[:count])
        assert same_bits(kernels.head_logits(x[:count], weight, own), logits[:count])
    named = kernels.NamedRows(weight_VD=weight, ids_SE=ids[:4, None].repeat(1, 3))
    _, named_best = kernels.head_rows_argmax(x[:4], named, own)
    assert same_bits(named_best, best[:4])
    rows = plain(4, width, seed=4, dtype=dtype, device=DEVICE)
    found = kernels.head_logits(rows, weight, own)
    expected = head_logits_twin(
        rows.cpu(), weight.cpu(), RowNorm(weight_D=own.weight_D.cpu(), eps=own.eps)
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "columns"), [(576, 960), (2048, 3072), (4096, 6144)])
def test_joined_halves(width: int, columns: int, dtype: torch.dtype) -> None:
    table = adversarial(300, width, seed=1, dtype=dtype, device=DEVICE)
    ids = torch.arange(NUM_ROWS, device=DEVICE) * 7 % 300
    states = adversarial(NUM_ROWS, width, seed=2, dtype=dtype, device=DEVICE)
    weight = plain(columns, 2 * width, seed=3, dtype=dtype, device=DEVICE)
    norms = norm_of(width, dtype, seed=4), norm_of(width, dtype, seed=5)

    def op(ids: torch.Tensor, states: torch.Tensor, *, overlap: bool = False) -> torch.Tensor:
        first = RowHalf(rows_XD=table, ids_M=ids, norm=norms[0])
        second = RowHalf(rows_XD=states, norm=norms[1])
        return joined_linear.launch_joined_linear(first, second, weight, overlap=overlap)

    assert_rows_independent(op, (ids, states), SOME_COUNTS, seed=6)
    assert same_bits(op(ids, states, overlap=True), op(ids, states))
    halves = [
        RowHalf(
            rows_XD=plain(5, width, seed=7 + place, dtype=dtype, device=DEVICE),
            norm=norms[place],
        )
        for place in range(2)
    ]
    found = kernels.joined_linear(*halves, weight)
    on_cpu = [
        RowHalf(
            rows_XD=half.rows_XD.cpu(),
            norm=RowNorm(weight_D=norms[place].weight_D.cpu(), eps=1e-5),
        )
        for place, half in enumerate(halves)
    ]
    expected = joined_linear_twin(*on_cpu, weight.cpu())
    rtol = 2 * HALF_ULP[dtype] + 1e-4
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (6, 2, 24)])
def test_norms_inside_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    for width in (1, 5, 9):
        dense = dense_requests(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, width=width,
            lengths=(9, 200, 256, 700), dtype=dtype, device=DEVICE, has_norms=True,
        )  # fmt: skip
        for overlap in (False, True):
            layer, found = dense.attend(
                attention.launch_paged_attention, window=None, overlap=overlap
            )
            other, expected = dense.attend_separately(attention, rope, kv_write, norm, window=None)
            assert same_bits(found, expected), f"W={width}: {differing(found, expected)}"
            assert same_bits(layer.k.nan_to_num(9.0), other.k.nan_to_num(9.0))
