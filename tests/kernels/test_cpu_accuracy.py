"""The torch twins against float64, and the rounding points of `transformers`."""

from __future__ import annotations

import pytest
import torch

from runtime import kernels
from tests.kernels.ladder import adversarial, paged_requests, plain, same_bits, tail_rows
from tests.kernels.references import (
    HALF_ULP,
    assert_linear_close,
    attention_reference,
    rms_norm_reference,
    rope_reference,
    silu_and_mul_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), [(576, 960), (1536, 576), (24, 16), (33, 65)])
def test_linear(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(21, features, seed=1, dtype=dtype)
    weight = plain(columns, features, seed=2, dtype=dtype)
    bias = plain(columns, seed=3, dtype=dtype)
    assert_linear_close(kernels.linear(x, weight), x, weight)
    assert_linear_close(kernels.linear(x, weight, bias), x, weight, bias)
    as_float32 = kernels.linear(x, weight, out_dtype=torch.float32)
    assert as_float32.dtype == torch.float32
    assert_linear_close(as_float32, x, weight)


def test_linear_of_no_rows() -> None:
    out = kernels.linear(torch.empty(0, 16), torch.ones(24, 16), out_dtype=torch.float32)
    assert out.shape == (0, 24)
    ids, logits = kernels.head_argmax(torch.empty(0, 16), torch.ones(24, 16))
    assert ids.shape == logits.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype: torch.dtype) -> None:
    # 3 roundings: normalised value, product, and the float32 work (below one more half ulp).
    relative = 3 * HALF_ULP[dtype] + 1e-6
    x = plain(9, 576, seed=1, dtype=dtype)
    weight = plain(576, seed=3, dtype=dtype)
    expected = rms_norm_reference(x, weight, 1e-5)
    got = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got.double(), expected, rtol=relative, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_norm_is_the_norm_of_each_head(dtype: torch.dtype) -> None:
    x = plain(5, 8, 64, seed=1, dtype=dtype)[:, 2:6]
    weight = plain(64, seed=2, dtype=dtype)
    got = kernels.head_rms_norm(x, weight, 1e-6)
    for head in range(4):
        assert same_bits(got[:, head], kernels.rms_norm(x[:, head], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(dtype: torch.dtype) -> None:
    q, k = plain(7, 6, 64, seed=1, dtype=dtype), plain(7, 2, 64, seed=2, dtype=dtype)
    positions = torch.tensor([0, 1, 5, 5, 99, 3, 42])
    angles = torch.arange(100).unsqueeze(1) * torch.rand(32, generator=torch.Generator())
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    for got, x in zip(kernels.apply_rope(q, k, positions, table), (q, k), strict=True):
        expected = rope_reference(x, positions, table)
        # One rounding of the result, plus float32 sums of terms below |first| + |second|.
        allowed = HALF_ULP[dtype] * expected.abs() + 2.0**-22 * x.double().abs().amax()
        assert bool(((got.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation(dtype: torch.dtype) -> None:
    gate_up = plain(9, 2 * 77, seed=1, dtype=dtype) * 4
    expected = silu_and_mul_reference(gate_up)
    got = kernels.silu_and_mul(gate_up).double()
    torch.testing.assert_close(got, expected, rtol=2 * HALF_ULP[dtype] + 1e-6, atol=1e-6)


def test_activation_of_extreme_gates() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 2.0, 2.0]])
    got = kernels.silu_and_mul(gate_up)
    assert torch.equal(got, torch.tensor([[0.0, 400.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_rounds_where_transformers_does(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="transformers is not installed"
    )
    x, weight = plain(16, 576, seed=1, dtype=dtype), plain(576, seed=2, dtype=dtype)
    norm = modeling.LlamaRMSNorm(576, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        expected = norm(x)
    got = kernels.rms_norm(x, weight, 1e-5)
    # The mean square may differ in its last bit; in bf16 that rarely moves a rounding.
    torch.testing.assert_close(got, expected, rtol=2 * HALF_ULP[dtype], atol=1e-6)
    assert float((got == expected).float().mean()) > 0.4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 300, 20])
def test_attention(window: int | None, dtype: torch.dtype) -> None:
    requests = paged_requests(
        num_kv_heads=3, head_dim=64, kv_block_size=16, lengths=(1, 40, 256, 600), dtype=dtype,
        seed=5, write=kernels.write_kv, fill=plain,
    )  # fmt: skip
    rows = tail_rows(requests, 6)
    q = plain(len(rows), 9, 64, seed=6, dtype=dtype)
    got = kernels.paged_attention(
        q, requests.layer, requests.batch(rows), scale=0.125, window=window
    )
    expected = attention_reference(q, requests, rows, scale=0.125, window=window)
    # float32 sums of at most 600 terms of size about 1, then one rounding.
    torch.testing.assert_close(got.double(), expected, rtol=HALF_ULP[dtype], atol=5e-6)


def test_write_kv_touches_its_slots_only() -> None:
    requests = paged_requests(
        num_kv_heads=2, head_dim=8, kv_block_size=4, lengths=(3, 9), dtype=torch.float32, seed=1,
        write=kernels.write_kv, fill=plain,
    )  # fmt: skip
    written = ~requests.layer.k.isnan()
    assert int(written.sum()) == (3 + 9) * 2 * 8
    assert torch.equal(written, ~requests.layer.v.isnan())
    key = requests.layer.k[int(requests.tables[1, 2]), :, 0]
    assert torch.equal(key, plain(9, 2, 8, seed=1 + 2 + 1, dtype=torch.float32)[8])


def test_embed_copies_rows() -> None:
    weight = plain(10, 6, seed=1, dtype=torch.bfloat16)
    ids = torch.tensor([3, 0, 9, 3])
    assert torch.equal(kernels.embed(ids, weight), weight[ids])


def test_argmax_takes_the_lowest_id_of_a_tie() -> None:
    weight = torch.zeros(300, 16)
    weight[[5, 140, 299], 0] = 1.0
    weight[[0, 299], 1] = -1.0
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0], x[2, 1] = 2.0, -1.0, -3.0
    ids, logits = kernels.head_argmax(x, weight)
    assert ids.tolist() == [5, 0, 0]
    assert logits.tolist() == [2.0, 0.0, 3.0]


def test_argmax_never_takes_a_nan() -> None:
    weight = torch.zeros(40, 16)
    weight[7] = float("nan")
    weight[9, 0] = 1.0
    ids, logits = kernels.head_argmax(torch.ones(2, 16), weight)
    assert ids.tolist() == [9, 9]
    assert logits.tolist() == [1.0, 1.0]
    ids, _ = kernels.head_argmax(torch.full((1, 16), float("nan")), weight)
    assert ids.tolist() == [0]


def test_named_rows_take_the_lowest_id_and_never_a_nan_or_nothing() -> None:
    weight = torch.zeros(9, 16)
    weight[4] = float("nan")
    weight[[2, 6], 0] = 1.0
    ids = torch.tensor([[6, 2, 6, -1], [4, 0, 8, 4], [-1, -1, -1, -1], [4, -1, -1, 4]])
    named = kernels.NamedRows(weight_VD=weight, ids_SE=ids)
    found, logits = kernels.head_rows_argmax(torch.ones(4, 16), named)
    assert found.tolist()[:2] == [2, 0]
    assert logits.tolist() == [1.0, 0.0, float("-inf"), float("-inf")]
    nothing = kernels.NamedRows(weight_VD=weight, ids_SE=ids[:2, :0])
    found, logits = kernels.head_rows_argmax(torch.ones(2, 16), nothing)
    assert (found.shape, logits.tolist()) == ((2,), [float("-inf")] * 2)


def test_argmax_agrees_with_the_logits() -> None:
    x = adversarial(20, 576, seed=1, dtype=torch.bfloat16)
    weight = adversarial(500, 576, seed=2, dtype=torch.bfloat16)
    logits = kernels.head_logits(x, weight)
    ids, best = kernels.head_argmax(x, weight)
    assert torch.equal(best, logits.amax(dim=1))
    assert torch.equal(logits.gather(1, ids.unsqueeze(1)).squeeze(1), best)
