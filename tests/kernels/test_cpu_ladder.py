"""Exactness ladder, step 1, on the torch twins."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

import pytest
import torch

from runtime import kernels
from runtime.kernels import attention as attention_module
from runtime.kv import KVLayer
from tests.kernels.ladder import (
    EVERY_COUNT,
    NUM_ROWS,
    SOME_COUNTS,
    adversarial,
    assert_attention_rows_independent,
    assert_rows_independent,
    paged_requests,
    plain,
    same_bits,
    tail_rows,
)
from tests.kernels.references import assert_linear_close

DTYPES = [torch.float32, torch.bfloat16]
# (K, N): SmolLM2 fused qkv, o, separate kv, gate and up, down, draft fc and qkv; tiny odd shapes
SHAPES = [
    (576, 960), (576, 576), (576, 192), (576, 3072), (1536, 576), (1728, 576), (1152, 960),
    (16, 24), (24, 16), (40, 16), (7, 3), (33, 65),
]  # fmt: skip
HEADS = [(576, 49_152), (576, 8_192), (16, 64)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), SHAPES)
def test_linear_rows(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, features, seed=1, dtype=dtype)
    weight = adversarial(columns, features, seed=2, dtype=dtype)
    op = functools.partial(kernels.linear, weight_NK=weight)
    assert_rows_independent(op, (x,), EVERY_COUNT, seed=3)
    with threads(2):
        assert_rows_independent(op, (x[:20],), (5, 16, 20), seed=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_rows_with_bias_and_float32_result(dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, 576, seed=1, dtype=dtype)
    weight = adversarial(320, 576, seed=2, dtype=dtype)
    bias = adversarial(320, seed=4, dtype=dtype)
    for out_dtype in (dtype, torch.float32):
        op = functools.partial(kernels.linear, weight_NK=weight, bias_N=bias, out_dtype=out_dtype)
        assert_rows_independent(op, (x,), SOME_COUNTS, seed=3)


def test_linear_rows_on_a_machine_without_bfloat16_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The package exports the function `linear`, which hides the module of that name.
    module = importlib.import_module("runtime.kernels.linear")
    monkeypatch.setattr(module, "_sums_bfloat16_in_float32", lambda: False)
    x = adversarial(NUM_ROWS, 576, seed=1, dtype=torch.bfloat16)
    weight = adversarial(192, 576, seed=2, dtype=torch.bfloat16)
    op = functools.partial(kernels.linear, weight_NK=weight)
    assert_rows_independent(op, (x,), SOME_COUNTS, seed=3)
    assert_linear_close(op(x), x, weight)


def test_linear_does_not_read_alignment_or_strides() -> None:
    features = 24
    x = adversarial(NUM_ROWS, features, seed=1, dtype=torch.float32)
    weight = adversarial(40, features, seed=2, dtype=torch.float32)
    expected = kernels.linear(x, weight)
    shifted = torch.empty(NUM_ROWS * features + 3)[3:].view(NUM_ROWS, features)
    shifted.copy_(x)
    wide = torch.zeros(NUM_ROWS, features + 5)
    wide[:, :features] = x
    assert same_bits(kernels.linear(shifted, weight), expected)
    assert same_bits(kernels.linear(wide[:, :features], weight), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), HEADS)
def test_head_rows(features: int, columns: int, dtype: torch.dtype) -> None:
    num_rows = 18 if columns > 10_000 else NUM_ROWS
    x = adversarial(num_rows, features, seed=5, dtype=dtype)
    weight = adversarial(columns, features, seed=6, dtype=dtype)
    counts = (5, 17) if columns > 10_000 else (2, 16, 33, 64)
    for op in (kernels.head_logits, kernels.head_argmax):
        assert_rows_independent(functools.partial(op, weight_VD=weight), (x,), counts, seed=7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_products_that_take_in_norms(dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, 576, seed=1, dtype=dtype)
    states = adversarial(NUM_ROWS, 576, seed=2, dtype=dtype)
    norm = kernels.RowNorm(weight_D=plain(576, seed=3, dtype=dtype), eps=1e-5)
    head = plain(300, 576, seed=4, dtype=dtype)
    weight = plain(200, 1152, seed=5, dtype=dtype)

    def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        halves = (kernels.RowHalf(rows_XD=rows, norm=norm) for rows in (first, second))
        return kernels.joined_linear(*halves, weight)

    for op in (kernels.head_logits, kernels.head_argmax):
        choose = functools.partial(op, weight_VD=head, norm=norm)
        assert_rows_independent(choose, (x,), (2, 16, 33, 64), seed=6)
    assert_rows_independent(join, (x, states), (2, 16, 33, 64), seed=6)
    table = torch.cat((states, x))
    ids = torch.arange(NUM_ROWS) + NUM_ROWS
    looked_up = kernels.joined_linear(
        kernels.RowHalf(rows_XD=table, ids_M=ids, norm=norm),
        kernels.RowHalf(rows_XD=states, norm=norm),
        weight,
    )
    assert same_bits(looked_up, join(x, states))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), [(576, 5000), (2048, 2100), (40, 101)])
def test_a_reduced_head_has_the_bits_of_the_full_one(
    features: int, columns: int, dtype: torch.dtype
) -> None:
    """The library sums a narrow weight in another order; fixed column tiles do not let it."""
    x = adversarial(3, features, seed=5, dtype=dtype)
    weight = adversarial(columns, features, seed=6, dtype=dtype)
    full = kernels.head_logits(x, weight)
    generator = torch.Generator().manual_seed(7)
    for count in (1, 2, 17, 64, 100):
        kept = torch.randperm(columns, generator=generator)[:count]
        assert same_bits(kernels.head_logits(x, weight[kept]), full[:, kept])
        named = kernels.NamedRows(weight_VD=weight, ids_SE=kept.expand(3, count))
        ids, best = kernels.head_rows_argmax(x, named)
        assert same_bits(best, full[:, kept].amax(dim=1))
        assert same_bits(full.gather(1, ids[:, None]).squeeze(1), best)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 24, 7])
def test_norm_rows(width: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, width, seed=1, dtype=dtype)
    weight = plain(width, seed=3, dtype=dtype)
    norm = functools.partial(kernels.rms_norm, weight_D=weight, eps=1e-5)
    head_norm = functools.partial(kernels.head_rms_norm, weight_P=weight, eps=1e-5)
    assert_rows_independent(norm, (x,), EVERY_COUNT, seed=4)
    heads = adversarial(NUM_ROWS, 5, width, seed=5, dtype=dtype)
    assert_rows_independent(head_norm, (heads[:, 1:4],), EVERY_COUNT, seed=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_rows(dtype: torch.dtype) -> None:
    q = adversarial(NUM_ROWS, 3, 24, seed=1, dtype=dtype)
    k = adversarial(NUM_ROWS, 1, 24, seed=2, dtype=dtype)
    positions = torch.arange(NUM_ROWS).flip(0) * 3
    table = plain(NUM_ROWS * 3, 24, seed=3, dtype=torch.float32)
    op = functools.partial(kernels.apply_rope, cos_sin_TP=table)
    assert_rows_independent(op, (q, k, positions), EVERY_COUNT, seed=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1536, 24, 5])
def test_activation_rows(width: int, dtype: torch.dtype) -> None:
    gate_up = adversarial(NUM_ROWS, 2 * width, seed=1, dtype=dtype)
    assert_rows_independent(kernels.silu_and_mul, (gate_up,), EVERY_COUNT, seed=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kv_block_size", "window"),
    [
        (9, 3, 64, 16, None),
        (9, 3, 64, 16, 300),
        (2, 2, 8, 4, 20),
        (4, 1, 16, 48, None),
        (2, 1, 72, 48, None),  # segments of a wide head begin inside of blocks
    ],
)
def test_attention_rows(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    requests = paged_requests(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_block_size=kv_block_size,
        lengths=(1, 5, 255, 256, 258, 530),
        dtype=dtype,
        seed=11,
        write=kernels.write_kv,
    )
    rows = tail_rows(requests, 18)
    q = adversarial(len(rows), num_heads, head_dim, seed=12, dtype=dtype)
    op = functools.partial(kernels.paged_attention, scale=head_dim**-0.5, window=window)
    assert_attention_rows_independent(op, requests, q, rows, (2, 8, 33, len(rows)), seed=13)
    with threads(2):
        tail = slice(len(rows) - 20, None)
        assert_attention_rows_independent(op, requests, q[tail], rows[tail], (9, 20), seed=13)


def test_attention_ignores_the_longest_request() -> None:
    requests = paged_requests(
        num_kv_heads=1, head_dim=16, kv_block_size=16, lengths=(40, 900), dtype=torch.float32,
        seed=1, write=kernels.write_kv,
    )  # fmt: skip
    q = adversarial(2, 2, 16, seed=2, dtype=torch.float32)
    both = kernels.paged_attention(
        q, requests.layer, requests.batch([(0, 39), (1, 899)]), scale=0.25
    )
    short = kernels.paged_attention(q[:1], requests.layer, requests.batch([(0, 39)]), scale=0.25)
    assert same_bits(both[:1], short)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_ignores_what_only_other_rows_of_the_request_see(
    part: str, poison: float, window: int | None
) -> None:
    """A draft whose key or value overflows is seen by the rows after it, not by those before."""
    requests = paged_requests(
        num_kv_heads=1, head_dim=16, kv_block_size=16, lengths=(300,), dtype=torch.float32,
        seed=1, write=kernels.write_kv,
    )  # fmt: skip
    rows = [(0, position) for position in range(250, 266)]
    q = adversarial(len(rows), 2, 16, seed=2, dtype=torch.float32)
    attend = functools.partial(kernels.paged_attention, scale=0.25, window=window)
    clean = attend(q, requests.layer, requests.batch(rows))
    pool = getattr(requests.layer, part)
    pool[requests.tables[0, 253 // 16], :, 253 % 16] = poison
    found = attend(q, requests.layer, requests.batch(rows))
    assert same_bits(found[:3], clean[:3])
    if window is not None:
        assert same_bits(found[3 + window :], clean[3 + window :])
    alone = [
        attend(q[i : i + 1], requests.layer, requests.batch(rows[i : i + 1])) for i in range(16)
    ]
    assert torch.equal(found.nan_to_num(7.0), torch.cat(alone).nan_to_num(7.0))


def test_negative_control_a_plain_product_of_m_rows_differs() -> None:
    """The ladder's equality has teeth: the library alone breaks it on a SmolLM2 shape."""
    differs = []
    for features, columns in SHAPES[:7]:
        x = adversarial(NUM_ROWS, features, seed=1, dtype=torch.float32)
        weight = adversarial(columns, features, seed=2, dtype=torch.float32)
        op = functools.partial(torch.nn.functional.linear, weight=weight)
        try:
            assert_rows_independent(op, (x,), (2, 5, 16, 33), seed=3)
        except AssertionError:
            differs.append((features, columns))
    assert differs, "no shape told a plain product apart: the ladder cannot see a broken one"


def test_negative_control_a_segment_size_that_follows_the_batch_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = paged_requests(
        num_kv_heads=3, head_dim=64, kv_block_size=16, lengths=(200, 500), dtype=torch.float32,
        seed=1, write=kernels.write_kv, fill=plain,
    )  # fmt: skip

    def attend_by_count(q: torch.Tensor, layer: KVLayer, batch: object) -> torch.Tensor:
        longest = batch.max_length  # type: ignore[attr-defined]
        monkeypatch.setattr(attention_module, "attention_segment", lambda _: -(-longest // 4))
        return kernels.paged_attention(q, layer, batch, scale=0.125)  # type: ignore[arg-type]

    rows = tail_rows(requests, 8)
    q = plain(len(rows), 9, 64, seed=2, dtype=torch.float32)
    with pytest.raises(AssertionError, match="differ"):
        assert_attention_rows_independent(attend_by_count, requests, q, rows, (16,), seed=3)
