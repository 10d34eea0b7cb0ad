"""Exactness ladder, step 1, and accuracy of the Triton kernels on a CUDA GPU, bf16 and fp16.

Needs torch, triton and pytest only. Every product is checked over all row tiles (BLOCK_M 16, 32 and
64, so across the change of matrix instruction) on the shapes of SmolLM2-135M and Qwen3-8B.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from runtime import kernels
from runtime.kernels.gemm_table import gemm_config
from runtime.kv import KVLayer
from tests.kernels.ladder import (
    EVERY_COUNT,
    NUM_ROWS,
    SOME_COUNTS,
    PagedRequests,
    adversarial,
    assert_attention_rows_independent,
    assert_rows_independent,
    differing,
    paged_requests,
    plain,
    same_bits,
    tail_rows,
)
from tests.kernels.references import (
    HALF_ULP,
    assert_linear_close,
    attention_reference,
    rms_norm_reference,
    rope_reference,
    silu_and_mul_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
# (K, N): SmolLM2 qkv, o, gate and up, down, draft fc and qkv; Qwen3-8B qkv, o, gate and up, down
SMOLLM2 = [(576, 960), (576, 576), (576, 3072), (1536, 576), (1728, 576), (1152, 960)]
QWEN3_8B = [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
ODD = [(16, 24), (40, 16), (33, 65), (7, 3)]
HEADS = [(576, 49_152), (576, 8_192), (4096, 151_936)]
LAYOUTS = [(9, 3, 64, 16), (32, 8, 128, 16), (6, 2, 24, 48)]  # H, G, P, kv_block_size
PREFILL_ROWS = 1_100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), SMOLLM2 + QWEN3_8B + ODD)
def test_linear_rows(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, features, seed=1, dtype=dtype, device=DEVICE)
    weight = adversarial(columns, features, seed=2, dtype=dtype, device=DEVICE)
    op = functools.partial(kernels.linear, weight_NK=weight)
    assert_rows_independent(op, (x,), EVERY_COUNT, seed=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), [(576, 960), (1536, 576), (4096, 6144)])
def test_prefill_rows_are_decode_rows(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(PREFILL_ROWS, features, seed=1, dtype=dtype, device=DEVICE)
    weight = adversarial(columns, features, seed=2, dtype=dtype, device=DEVICE)
    bias = adversarial(columns, seed=3, dtype=dtype, device=DEVICE)
    op = functools.partial(kernels.linear, weight_NK=weight, bias_N=bias)
    full = op(x)
    for start, count in ((0, 1), (63, 1), (64, 5), (1_000, 17), (1_099, 1)):
        part = op(x[start : start + count])
        assert same_bits(full[start : start + count], part), differing(
            full[start : start + count], part
        )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("features", "columns"), [*SMOLLM2[:4], *QWEN3_8B, *ODD])
def test_linear_accuracy(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(21, features, seed=1, dtype=dtype, device=DEVICE)
    weight = plain(columns, features, seed=2, dtype=dtype, device=DEVICE)
    bias = plain(columns, seed=3, dtype=dtype, device=DEVICE)
    assert_linear_close(kernels.linear(x, weight), x, weight)
    assert_linear_close(kernels.linear(x, weight, bias), x, weight, bias)
    assert_linear_close(kernels.linear(x, weight, out_dtype=torch.float32), x, weight)


def test_float32_rows() -> None:
    x = adversarial(NUM_ROWS, 576, seed=1, dtype=torch.float32, device=DEVICE)
    weight = adversarial(960, 576, seed=2, dtype=torch.float32, device=DEVICE)
    op = functools.partial(kernels.linear, weight_NK=weight)
    assert_rows_independent(op, (x,), SOME_COUNTS, seed=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_close_to_its_twin(dtype: torch.dtype) -> None:
    x = adversarial(33, 1536, seed=1, dtype=dtype, device=DEVICE)
    weight = plain(576, 1536, seed=2, dtype=dtype, device=DEVICE)
    got = kernels.linear(x, weight, out_dtype=torch.float32).cpu()
    twin = kernels.linear(x.cpu(), weight.cpu(), out_dtype=torch.float32)
    total = x.cpu().float().abs() @ weight.cpu().float().abs().t()
    # Two float32 sums of 1536 products, in different orders.
    assert bool(((got - twin).abs() <= 2 * 1536 * 2.0**-24 * total).all())


def test_negative_control_a_split_that_follows_the_rows_differs() -> None:
    from runtime.kernels.cuda.device import device_arch
    from runtime.kernels.cuda.linear import launch_linear

    x = adversarial(NUM_ROWS, 1536, seed=1, dtype=torch.bfloat16, device=DEVICE)
    weight = adversarial(576, 1536, seed=2, dtype=torch.bfloat16, device=DEVICE)
    pinned = gemm_config(576, 1536, element_bytes=2, arch=device_arch(x.device))

    def follow_rows(rows: torch.Tensor) -> torch.Tensor:
        split_k = 1 if rows.shape[0] > 8 else 4
        return launch_linear(rows, weight, config=dataclasses.replace(pinned, split_k=split_k))

    with pytest.raises(AssertionError, match="differ"):
        assert_rows_independent(follow_rows, (x,), (2, 16, 33), seed=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), HEADS)
def test_head_rows(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, features, seed=5, dtype=dtype, device=DEVICE)
    weight = adversarial(columns, features, seed=6, dtype=dtype, device=DEVICE)
    for op in (kernels.head_logits, kernels.head_argmax):
        counts = (5, 17, 40, 64) if columns > 100_000 else SOME_COUNTS
        assert_rows_independent(functools.partial(op, weight_VD=weight), (x,), counts, seed=7)
    logits = kernels.head_logits(x, weight)
    ids, best = kernels.head_argmax(x, weight)
    assert same_bits(best, logits.amax(dim=1))
    first = torch.where(logits == best.unsqueeze(1), 1, 0).cumsum(1).eq(0).sum(1)
    assert torch.equal(ids, first)
    kept = torch.arange(3, columns, 5, device=DEVICE)
    assert same_bits(kernels.head_logits(x, weight[kept]), logits[:, kept])


def test_head_ties_and_nan() -> None:
    weight = torch.zeros(300, 32, dtype=torch.bfloat16, device=DEVICE)
    weight[[5, 6, 140, 299], 0] = 1.0
    x = torch.zeros(2, 32, dtype=torch.bfloat16, device=DEVICE)
    x[0, 0], x[1, 0] = 2.0, -1.0
    ids, logits = kernels.head_argmax(x, weight)
    assert ids.tolist() == [5, 0]
    assert logits.tolist() == [2.0, 0.0]
    weight[5] = float("nan")
    ids, logits = kernels.head_argmax(x[:1], weight)
    assert (ids.tolist(), logits.tolist()) == ([6], [2.0])
    ids, _ = kernels.head_argmax(torch.full_like(x, float("nan")), weight)
    assert ids.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 4096, 128, 24])
def test_norms(width: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, width, seed=1, dtype=dtype, device=DEVICE)
    weight = plain(width, seed=3, dtype=dtype, device=DEVICE)
    norm = functools.partial(kernels.rms_norm, weight_D=weight, eps=1e-5)
    head_norm = functools.partial(kernels.head_rms_norm, weight_P=weight, eps=1e-5)
    assert_rows_independent(norm, (x,), SOME_COUNTS, seed=4)
    heads = adversarial(NUM_ROWS, 5, width, seed=5, dtype=dtype, device=DEVICE)
    assert_rows_independent(head_norm, (heads[:, 1:4],), SOME_COUNTS, seed=4)
    # Roundings of the normalised value and of the product, and float32 work below them.
    expected = rms_norm_reference(x, weight, 1e-5)
    tolerance = {"rtol": 3 * HALF_ULP[dtype], "atol": 1e-6}
    torch.testing.assert_close(norm(x).double(), expected, **tolerance)
    assert same_bits(head_norm(heads[:, 1:4])[:, 1], norm(heads[:, 2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "_block"), LAYOUTS)
def test_rope(
    num_heads: int, num_kv_heads: int, head_dim: int, _block: int, dtype: torch.dtype
) -> None:
    qkv = plain(
        NUM_ROWS, num_heads + 2 * num_kv_heads, head_dim, seed=1, dtype=dtype, device=DEVICE
    )
    q, k = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
    positions = torch.arange(NUM_ROWS, device=DEVICE).flip(0) * 31
    angles = torch.arange(2_000, device=DEVICE).unsqueeze(1) * torch.linspace(
        1e-4, 1, head_dim // 2, device=DEVICE
    )
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    op = functools.partial(kernels.apply_rope, cos_sin_TP=table)
    assert_rows_independent(op, (q, k, positions), SOME_COUNTS, seed=2)
    for got, x in zip(op(q, k, positions), (q, k), strict=True):
        expected = rope_reference(x, positions, table)
        allowed = HALF_ULP[dtype] * expected.abs() + 2.0**-22 * x.double().abs().amax()
        assert bool(((got.double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1_536, 12_288, 5])
def test_activation(width: int, dtype: torch.dtype) -> None:
    gate_up = plain(NUM_ROWS, 2 * width, seed=1, dtype=dtype, device=DEVICE) * 4
    assert_rows_independent(kernels.silu_and_mul, (gate_up,), SOME_COUNTS, seed=2)
    # Roundings of silu and of the product; float16 results below 6e-5 are subnormal.
    torch.testing.assert_close(
        kernels.silu_and_mul(gate_up).double(),
        silu_and_mul_reference(gate_up),
        rtol=2 * HALF_ULP[dtype] + 1e-6,
        atol=1e-6,
    )
    extreme = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 2.0, 2.0]], dtype=dtype, device=DEVICE)
    assert kernels.silu_and_mul(extreme).tolist() == [[0.0, 400.0, 0.0]]


def test_embed() -> None:
    weight = plain(500, 576, seed=1, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.tensor([3, 0, 499, 3], device=DEVICE)
    assert torch.equal(kernels.embed(ids, weight), weight[ids])


def _requests(layout: tuple[int, int, int, int], dtype: torch.dtype) -> PagedRequests:
    _, num_kv_heads, head_dim, kv_block_size = layout
    return paged_requests(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_block_size=kv_block_size,
        lengths=(1, 5, 64, 255, 256, 258, 530, 1_030),
        dtype=dtype,
        seed=11,
        write=kernels.write_kv,
        device=DEVICE,
        fill=plain,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 300, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention(
    layout: tuple[int, int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    num_heads, _, head_dim, _ = layout
    requests = _requests(layout, dtype)
    rows = tail_rows(requests, 9)
    q = adversarial(len(rows), num_heads, head_dim, seed=12, dtype=dtype, device=DEVICE)
    op = functools.partial(kernels.paged_attention, scale=head_dim**-0.5, window=window)
    assert_attention_rows_independent(op, requests, q, rows, (2, 9, 17, len(rows)), seed=13)
    calm = plain(len(rows), num_heads, head_dim, seed=14, dtype=dtype, device=DEVICE)
    got = op(calm, requests.layer, requests.batch(rows))
    expected = attention_reference(calm, requests, rows, scale=head_dim**-0.5, window=window)
    # Weights are rounded to the storage dtype before they meet values of size up to about 5.
    torch.testing.assert_close(
        got.double(), expected, rtol=2 * HALF_ULP[dtype], atol=4 * HALF_ULP[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kv_write_is_the_twin(dtype: torch.dtype) -> None:
    k, v = (plain(40, 3, 64, seed=s, dtype=dtype, device=DEVICE) for s in (1, 2))
    slots = torch.randperm(16 * 8, generator=torch.Generator().manual_seed(3))[:40]
    pools = []
    for device in (DEVICE, "cpu"):
        layer = KVLayer(
            k=torch.zeros(8, 3, 16, 64, dtype=dtype, device=device),
            v=torch.zeros(8, 3, 16, 64, dtype=dtype, device=device),
        )
        kernels.write_kv(k.to(device), v.to(device), layer, slots.to(device))
        pools.append(layer)
    assert same_bits(pools[0].k.cpu(), pools[1].k)
    assert same_bits(pools[0].v.cpu(), pools[1].v)


def test_probes_pass_on_this_gpu() -> None:
    weight = plain(960, 576, seed=1, dtype=torch.bfloat16, device=DEVICE)
    assert kernels.row_invariance_probe(weight).is_invariant
    assert kernels.attention_invariance_probe(
        num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16, device=torch.device(DEVICE)
    ).is_invariant


def test_a_captured_graph_gives_the_bits_of_eager_launches() -> None:
    dtype = torch.bfloat16
    requests = _requests(LAYOUTS[0], dtype)
    rows = tail_rows(requests, 2)
    batch = requests.batch(rows)
    x = plain(len(rows), 576, seed=1, dtype=dtype, device=DEVICE)
    weight = plain(576, 576, seed=2, dtype=dtype, device=DEVICE)
    down = plain(576, 1_536, seed=3, dtype=dtype, device=DEVICE)
    norm_weight = plain(576, seed=4, dtype=dtype, device=DEVICE)

    def layer() -> torch.Tensor:
        q = kernels.linear(x, weight).view(len(rows), 9, 64)
        out = kernels.paged_attention(q, requests.layer, batch, scale=0.125)
        normed = kernels.rms_norm(out.flatten(1) + x, norm_weight, 1e-5)
        wide = torch.cat((normed, normed, normed, normed, normed, normed), dim=1)[:, :3_072]
        return kernels.linear(kernels.silu_and_mul(wide), down)

    eager = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    assert same_bits(captured, eager)
    x.copy_(plain(len(rows), 576, seed=9, dtype=dtype, device=DEVICE))
    graph.replay()
    assert same_bits(captured, layer())
