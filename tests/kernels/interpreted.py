"""The Triton launchers under the interpreter; `test_interpreter.py` runs this file in a process
that sets TRITON_INTERPRET=1 before triton is imported.

float32 and float16 only: the interpreter keeps bfloat16 as raw bits and computes on those.
Shapes are small, since every program costs about a millisecond.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch

from runtime import kernels
from runtime.kernels.attention import paged_attention_twin
from runtime.kernels.cuda import (
    activation,
    attention,
    head,
    kv_write,
    linear,
    norm,
    rope,
)
from runtime.kernels.gemm_table import GemmConfig
from runtime.kernels.head import head_argmax_twin
from tests.kernels.ladder import (
    adversarial,
    assert_attention_rows_independent,
    assert_rows_independent,
    paged_requests,
    plain,
    same_bits,
    tail_rows,
)
from tests.kernels.references import HALF_ULP, assert_linear_close, attention_reference

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

DTYPES = [torch.float32, torch.float16]
SPLIT = GemmConfig(block_n=16, block_k=16, split_k=2)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the twin: the same rounding points, so at most one ulp and float32 noise."""
    torch.testing.assert_close(got, expected, rtol=2 * HALF_ULP[got.dtype] + 1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [None, SPLIT], ids=["rule", "split-k"])
@pytest.mark.parametrize(("features", "columns"), [(16, 24), (40, 50), (33, 7)])
def test_linear(features: int, columns: int, config: GemmConfig | None, dtype: torch.dtype) -> None:
    x = adversarial(37, features, seed=1, dtype=dtype)
    weight = plain(columns, features, seed=2, dtype=dtype)
    bias = plain(columns, seed=3, dtype=dtype)
    launch = functools.partial(linear.launch_linear, weight_NK=weight, config=config)
    assert_linear_close(launch(x), x, weight)
    assert_linear_close(launch(x, bias_N=bias), x, weight, bias)
    assert_linear_close(launch(x, out_dtype=torch.float32), x, weight)


def test_linear_reads_strided_rows() -> None:
    wide = plain(5, 60, seed=1, dtype=torch.float32)
    weight = plain(24, 40, seed=2, dtype=torch.float32)
    got = linear.launch_linear(wide[:, 10:50], weight)
    assert same_bits(got, linear.launch_linear(wide[:, 10:50].contiguous(), weight))


def test_linear_of_a_long_prefill_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = plain(150, 40, seed=1, dtype=torch.float32)
    weight = plain(16, 40, seed=2, dtype=torch.float32)
    whole = linear.launch_linear(x, weight, config=SPLIT)
    monkeypatch.setattr(linear, "_PARTIAL_BYTES", 1)
    assert same_bits(linear.launch_linear(x, weight, config=SPLIT), whole)


@pytest.mark.parametrize("config", [None, SPLIT], ids=["rule", "split-k"])
def test_linear_rows(config: GemmConfig | None) -> None:
    x = adversarial(20, 40, seed=1, dtype=torch.float32)
    weight = adversarial(24, 40, seed=2, dtype=torch.float32)
    op = functools.partial(linear.launch_linear, weight_NK=weight, config=config)
    assert_rows_independent(op, (x,), (2, 16, 17, 20), seed=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head(dtype: torch.dtype) -> None:
    x = adversarial(19, 40, seed=1, dtype=dtype)
    weight = plain(70, 40, seed=2, dtype=dtype)
    weight[[3, 41, 66]] = weight[[20, 20, 20]]  # ties within a tile and across tiles
    logits = head.launch_head_logits(x, weight)
    ids, best = head.launch_head_argmax(x, weight)
    assert_linear_close(logits, x, weight)
    assert same_bits(best, logits.amax(dim=1))
    assert torch.equal(ids, head_argmax_twin(x, weight)[0])
    assert not torch.isin(ids, torch.tensor([20, 41, 66])).any()


def test_head_never_takes_a_nan() -> None:
    weight = torch.zeros(70, 16)
    weight[[2, 40]] = float("nan")
    weight[[9, 50], 0] = 1.0
    ids, logits = head.launch_head_argmax(torch.ones(2, 16), weight)
    assert ids.tolist() == [9, 9]
    assert logits.tolist() == [1.0, 1.0]
    ids, _ = head.launch_head_argmax(torch.full((1, 16), float("nan")), weight)
    assert ids.tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype: torch.dtype) -> None:
    x = plain(3, 24, seed=1, dtype=dtype)
    weight = plain(24, seed=3, dtype=dtype)
    close(norm.launch_rms_norm(x, weight, 1e-5), kernels.rms_norm(x, weight, 1e-5))
    heads = plain(3, 5, 24, seed=4, dtype=dtype)[:, 1:4]
    got = norm.launch_head_rms_norm(heads, weight, 1e-5)
    close(got, kernels.head_rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(dtype: torch.dtype) -> None:
    qk = plain(4, 4, 24, seed=1, dtype=dtype)
    positions = torch.tensor([0, 5, 2, 9])
    table = plain(10, 24, seed=2, dtype=torch.float32)
    inputs = (qk[:, :3], qk[:, 3:], positions, table)
    pairs = zip(rope.launch_apply_rope(*inputs), kernels.apply_rope(*inputs), strict=True)
    for got, expected in pairs:
        close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation(dtype: torch.dtype) -> None:
    gate_up = plain(3, 2 * 13, seed=1, dtype=dtype) * 4
    close(activation.launch_silu_and_mul(gate_up), kernels.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kv_block_size"), [(6, 2, 24, 16), (1, 1, 8, 48)]
)
def test_kv_write_and_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_block_size: int, dtype: torch.dtype
) -> None:
    make = functools.partial(
        paged_requests, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_block_size=kv_block_size,
        lengths=(3, 300), dtype=dtype, seed=1, fill=plain,
    )  # fmt: skip
    requests = make(write=kv_write.launch_write_kv)
    by_twin = make(write=kernels.write_kv)
    assert same_bits(requests.layer.k.nan_to_num(9.0), by_twin.layer.k.nan_to_num(9.0))
    assert same_bits(requests.layer.v.nan_to_num(9.0), by_twin.layer.v.nan_to_num(9.0))
    rows = [(0, 0), (0, 2), (1, 255), (1, 256), (1, 299)]
    q = plain(len(rows), num_heads, head_dim, seed=2, dtype=dtype)
    for window in (None, 280, 5):
        got = attention.launch_paged_attention(
            q, requests.layer, requests.batch(rows), scale=0.3, window=window
        )
        expected = attention_reference(q, requests, rows, scale=0.3, window=window)
        twin = paged_attention_twin(
            q, requests.layer, requests.batch(rows), scale=0.3, window=window
        )
        # In float16 the weights are rounded before they meet the values.
        atol = 5e-6 + 2 * HALF_ULP[dtype]
        torch.testing.assert_close(got.double(), expected, rtol=HALF_ULP[dtype], atol=atol)
        torch.testing.assert_close(got, twin, rtol=2 * HALF_ULP[dtype], atol=atol)


def test_attention_rows() -> None:
    requests = paged_requests(
        num_kv_heads=1, head_dim=16, kv_block_size=16, lengths=(3, 260), dtype=torch.float32,
        seed=1, write=kv_write.launch_write_kv,
    )  # fmt: skip
    rows = tail_rows(requests, 3)
    q = adversarial(len(rows), 2, 16, seed=2, dtype=torch.float32)
    op = functools.partial(attention.launch_paged_attention, scale=0.25)
    assert_attention_rows_independent(op, requests, q, rows, (2, 6), seed=3)


def test_attention_of_a_long_prefill_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = paged_requests(
        num_kv_heads=1, head_dim=16, kv_block_size=16, lengths=(260,), dtype=torch.float32,
        seed=1, write=kv_write.launch_write_kv,
    )  # fmt: skip
    rows = tail_rows(requests, 4)
    q = plain(len(rows), 2, 16, seed=2, dtype=torch.float32)
    op = functools.partial(
        attention.launch_paged_attention, q, requests.layer, requests.batch(rows), scale=0.25
    )
    whole = op()
    monkeypatch.setattr(attention, "_PARTIAL_BYTES", 1)
    assert same_bits(op(), whole)


@pytest.mark.parametrize("window", [None, 280, 5])
def test_rows_of_a_block_see_up_to_their_limit(window: int | None) -> None:
    requests = paged_requests(
        num_kv_heads=2, head_dim=24, kv_block_size=16, lengths=(6, 300), dtype=torch.float32,
        seed=1, write=kv_write.launch_write_kv, fill=plain,
    )  # fmt: skip
    rows, limits = [(0, 2), (0, 3), (1, 250), (1, 251)], [5, 5, 257, 251]
    q = plain(len(rows), 6, 24, seed=2, dtype=torch.float32)
    batch = requests.batch(rows, limits)
    got = attention.launch_paged_attention(q, requests.layer, batch, scale=0.3, window=window)
    twin = paged_attention_twin(q, requests.layer, batch, scale=0.3, window=window)
    expected = attention_reference(q, requests, rows, scale=0.3, window=window, limits=limits)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(twin.double(), expected, rtol=1e-5, atol=5e-6)
    own = attention.launch_paged_attention(
        q, requests.layer, requests.batch(rows), scale=0.3, window=window
    )
    assert same_bits(got[3], own[3])
    assert not torch.equal(got[:3], own[:3])
