"""Fused products, streams and acceptance on a CUDA GPU: rows, placements, magnitudes, accuracy.

Needs torch, triton and pytest only. Rows are compared bit for bit over every BLOCK_M, and over the
tiles that a tuning run may pin; accuracy is judged by float64 with the tolerance of `references`.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from runtime import kernels
from runtime.kernels.accept import accept_twin
from runtime.kernels.cuda import attention, kv_write, rope
from runtime.kernels.cuda.fused_linear import launch_residual_linear, launch_scaled_linear
from runtime.kernels.cuda.stream import launch_embed_stream, launch_enter_stream
from runtime.kernels.fused_table import FusedConfig
from runtime.kernels.stream import Stream, square_tile
from tests.kernels.dense import dense_requests
from tests.kernels.ladder import (
    EVERY_COUNT,
    NUM_ROWS,
    SOME_COUNTS,
    PagedRequests,
    adversarial,
    assert_rows_independent,
    differing,
    plain,
    same_bits,
)
from tests.kernels.references import HALF_ULP, attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
# (K, N): SmolLM2 qkv, gate and up; Llama-3.2-1B and Qwen3-8B the same; odd shapes
SCALED = [(576, 960), (2048, 3072), (4096, 6144), (24, 14), (40, 66)]
GATED = [(576, 3072), (2048, 16_384), (4096, 24_576), (24, 14)]
# (K, D): o and down
RESIDUAL = [(576, 576), (1536, 576), (2048, 2048), (8192, 2048), (4096, 4096), (12_288, 4096),
            (33, 50)]  # fmt: skip
EPS = 1e-5
PREFILL_ROWS = 1_100
SCALED_COLUMNS = {576: 960, 2048: 3072, 4096: 6144}


def make_stream(num_rows: int, width: int, dtype: torch.dtype, *, is_wild: bool) -> Stream:
    fill = adversarial if is_wild else plain
    x = fill(num_rows, width, seed=1, dtype=dtype, device=DEVICE)
    norm = 1 + plain(width, seed=2, dtype=dtype, device=DEVICE) / 4
    return kernels.enter_stream(x, norm)


def scaled_op(weight: torch.Tensor, **options: object) -> functools.partial[torch.Tensor]:
    """Return an op on (weighted rows, squares), as `assert_rows_independent` calls it."""

    def op(weighted_MD: torch.Tensor, squares_MT: torch.Tensor) -> torch.Tensor:
        rows = Stream(residual_MD=weighted_MD, weighted_MD=weighted_MD, squares_MT=squares_MT)
        return launch_scaled_linear(rows, weight, eps=EPS, **options)  # type: ignore[arg-type]

    return functools.partial(op)


def residual_op(
    weight: torch.Tensor, norm: torch.Tensor, **options: object
) -> functools.partial[tuple[torch.Tensor, ...]]:
    def op(x_MK: torch.Tensor, residual_MD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = launch_residual_linear(
            x_MK, weight, residual_MD=residual_MD, norm_D=norm, **options  # type: ignore[arg-type]
        )  # fmt: skip
        return made.residual_MD, made.weighted_MD, made.squares_MT

    return functools.partial(op)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("features", "columns", "is_gated"),
    [(*shape, False) for shape in SCALED] + [(*shape, True) for shape in GATED],
)
def test_scaled_rows(features: int, columns: int, is_gated: bool, dtype: torch.dtype) -> None:
    rows = make_stream(NUM_ROWS, features, dtype, is_wild=True)
    weight = adversarial(columns, features, seed=3, dtype=dtype, device=DEVICE)
    counts = EVERY_COUNT if features < 1000 else SOME_COUNTS
    op = scaled_op(weight, is_gated=is_gated)
    assert_rows_independent(op, (rows.weighted_MD, rows.squares_MT), counts, seed=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), RESIDUAL)
def test_residual_rows(features: int, columns: int, dtype: torch.dtype) -> None:
    x = adversarial(NUM_ROWS, features, seed=1, dtype=dtype, device=DEVICE)
    residual = adversarial(NUM_ROWS, columns, seed=2, dtype=dtype, device=DEVICE)
    weight = adversarial(columns, features, seed=3, dtype=dtype, device=DEVICE)
    norm = plain(columns, seed=4, dtype=dtype, device=DEVICE)
    op = residual_op(weight, norm)
    counts = EVERY_COUNT if features < 2000 else SOME_COUNTS
    assert_rows_independent(op, (x, residual), counts, seed=5)
    made = op(x, residual)
    entered = launch_enter_stream(made[0], norm)
    assert same_bits(entered.weighted_MD, made[1])
    assert same_bits(entered.squares_MT, made[2]), "another tree sums the squares"


# parts of K: (BLOCK_N, BLOCK_K, warps, stages, preload)
TILES = {
    1: (
        (32, 64, 4, 4, False), (64, 64, 8, 3, False), (32, 128, 2, 3, False),
        (64, 32, 4, 5, False), (32, 64, 4, 3, True), (64, 64, 8, 3, True),
    ),
    4: (
        (32, 64, 4, 4, False), (64, 64, 8, 3, False), (16, 64, 4, 6, False),
        (16, 64, 8, 3, True), (32, 64, 8, 3, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("features", "columns"), [(576, 576), (1536, 576), (2048, 2048)])
def test_tiles_move_no_bit(features: int, columns: int, dtype: torch.dtype) -> None:
    """BLOCK_N, warps, stages and the preload are free; BLOCK_K is where K has one part."""
    x = adversarial(NUM_ROWS, features, seed=1, dtype=dtype, device=DEVICE)
    residual = adversarial(NUM_ROWS, columns, seed=2, dtype=dtype, device=DEVICE)
    weight = adversarial(columns, features, seed=3, dtype=dtype, device=DEVICE)
    norm = plain(columns, seed=4, dtype=dtype, device=DEVICE)
    rows = make_stream(NUM_ROWS, features, dtype, is_wild=True)
    for parts, tiles in TILES.items():
        expected: list[torch.Tensor] = []
        for block_n, block_k, warps, stages, preload in tiles:
            config = FusedConfig(
                block_n=max(block_n, square_tile(columns)), block_k=block_k, num_warps=warps,
                num_stages=stages, preload=preload, parts=parts,
            )  # fmt: skip
            for count in (64, 1, 5, 17):
                inputs = rows.weighted_MD[:count], rows.squares_MT[:count]
                found = [
                    *residual_op(weight, norm, config=config)(x[:count], residual[:count]),
                    scaled_op(weight, config=config)(*inputs),
                    scaled_op(weight, config=config, is_gated=True)(*inputs),
                ]
                expected = expected or found
                for place, (got, want) in enumerate(zip(found, expected, strict=True)):
                    assert same_bits(got, want[:count]), f"{config} M={count} output {place}"


@pytest.mark.parametrize("count", [17, 40, 64, 65, 160, 225, 300, 600, PREFILL_ROWS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(576, 1536), (2048, 8192), (4096, 12_288)], ids=str
)
def test_every_row_tile_has_the_bits_of_a_row_alone(
    hidden: int, intermediate: int, dtype: torch.dtype, count: int
) -> None:
    """Each number of rows runs programs of its own; single rows run those of a decode step."""
    rows = make_stream(count, hidden, dtype, is_wild=True)
    qkv = adversarial(SCALED_COLUMNS[hidden], hidden, seed=2, dtype=dtype, device=DEVICE)
    gate_up = adversarial(2 * intermediate, hidden, seed=3, dtype=dtype, device=DEVICE)
    o = adversarial(hidden, hidden, seed=6, dtype=dtype, device=DEVICE)
    down = adversarial(hidden, intermediate, seed=4, dtype=dtype, device=DEVICE)
    norm = plain(hidden, seed=5, dtype=dtype, device=DEVICE)

    def layer(part: slice) -> tuple[torch.Tensor, ...]:
        stream = rows.weighted_MD[part], rows.squares_MT[part]
        mixed = residual_op(o, norm)(rows.weighted_MD[part], rows.residual_MD[part])
        gated = scaled_op(gate_up, is_gated=True)(*stream)
        return (
            scaled_op(qkv)(*stream), *mixed, gated,
            *residual_op(down, norm)(gated, rows.residual_MD[part]),
        )  # fmt: skip

    full = layer(slice(None))
    for start in {0, count // 3, count - 1}:
        part = slice(start, start + 1)
        for place, (got, want) in enumerate(zip(layer(part), full, strict=True)):
            assert same_bits(got, want[part]), f"output {place}: {differing(got, want[part])}"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("features", "columns"), [(576, 960), (4096, 6144), (40, 66)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scaled_accuracy(features: int, columns: int, has_bias: bool, dtype: torch.dtype) -> None:
    rows = make_stream(21, features, dtype, is_wild=False)
    weight = plain(columns, features, seed=3, dtype=dtype, device=DEVICE)
    bias = plain(columns, seed=4, dtype=dtype, device=DEVICE) if has_bias else None
    x = rows.residual_MD.double()
    scale = (x.pow(2).mean(dim=1, keepdim=True) + EPS).rsqrt()
    product = rows.weighted_MD.double() @ weight.double().t()
    expected = product * scale + (0 if bias is None else bias.double())
    # K float32 sums in any order, tensor cores that may truncate, an approximate reciprocal root.
    total = rows.weighted_MD.double().abs() @ weight.double().abs().t() * scale
    sums = ((features + 1) * 2.0**-24 + 2.0**-21) * total
    got = kernels.scaled_linear(rows, weight, bias, eps=EPS).double()
    assert bool(((got - expected).abs() <= sums + HALF_ULP[dtype] * expected.abs() + 1e-6).all())
    gate, up = expected[:, 0::2], expected[:, 1::2]
    gated = kernels.scaled_linear(rows, weight, bias, eps=EPS, is_gated=True).double()
    # silu changes by at most 1.1 times its argument's error.
    slack = 1.1 * (sums[:, 0::2] * (up.abs() + 1) + sums[:, 1::2] * (gate.abs() + 1)) + 1e-6
    want = gate * torch.sigmoid(gate) * up
    allowed = slack + (HALF_ULP[dtype] + 2.0**-20) * want.abs()
    assert bool(((gated - want).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("features", "columns"), [(1536, 576), (12_288, 4096), (33, 50)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_residual_accuracy(features: int, columns: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = plain(21, features, seed=1, dtype=dtype, device=DEVICE)
    residual = plain(21, columns, seed=2, dtype=dtype, device=DEVICE)
    weight = plain(columns, features, seed=3, dtype=dtype, device=DEVICE)
    norm = plain(columns, seed=4, dtype=dtype, device=DEVICE)
    bias = plain(columns, seed=5, dtype=dtype, device=DEVICE) if has_bias else None
    made = kernels.residual_linear(x, weight, bias, residual_MD=residual, norm_D=norm)
    expected = x.double() @ weight.double().t() + residual.double()
    expected = expected if bias is None else expected + bias.double()
    total = x.double().abs() @ weight.double().abs().t() + residual.double().abs()
    sums = ((features + 3) * 2.0**-24 + 2.0**-21) * total
    error = (made.residual_MD.double() - expected).abs()
    assert bool((error <= sums + HALF_ULP[dtype] * expected.abs() + 1e-6).all())
    assert same_bits(made.weighted_MD, (made.residual_MD.float() * norm.float()).to(dtype))
    squares = made.residual_MD.double().pow(2).sum(dim=1)
    torch.testing.assert_close(made.squares_MT.double().sum(dim=1), squares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_neighbour_that_is_nan_moves_no_bit(dtype: torch.dtype) -> None:
    rows = make_stream(20, 576, dtype, is_wild=False)
    weight = plain(960, 576, seed=3, dtype=dtype, device=DEVICE)
    clean = kernels.scaled_linear(rows, weight, eps=EPS)
    bad = dataclasses.replace(
        rows, weighted_MD=rows.weighted_MD.clone(), squares_MT=rows.squares_MT.clone()
    )
    bad.weighted_MD[3], bad.squares_MT[3] = float("nan"), float("inf")
    found = kernels.scaled_linear(bad, weight, eps=EPS)
    keep = [row for row in range(20) if row != 3]
    assert same_bits(found[keep], clean[keep])
    assert bool(found[3].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 2048, 4096, 50])
def test_embedding_rows_enter_as_any_rows(width: int, dtype: torch.dtype) -> None:
    table = adversarial(300, width, seed=1, dtype=dtype, device=DEVICE)
    norm = plain(width, seed=2, dtype=dtype, device=DEVICE)
    ids = torch.tensor([7, 0, 299, 7], device=DEVICE)
    for overlap in (False, True):
        found = launch_embed_stream(ids, table, norm, overlap=overlap)
        entered = launch_enter_stream(table[ids], norm)
        assert same_bits(found.residual_MD, table[ids])
        assert same_bits(found.weighted_MD, entered.weighted_MD)
        assert same_bits(found.squares_MT, entered.squares_MT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_chain_gives_the_bits_of_eager_launches(dtype: torch.dtype) -> None:
    """Twelve layers' products, each reading what the one before wrote, with early starts."""
    table = plain(300, 576, seed=1, dtype=dtype, device=DEVICE)
    norm = 1 + plain(576, seed=2, dtype=dtype, device=DEVICE) / 4
    gate_up = plain(3072, 576, seed=3, dtype=dtype, device=DEVICE) / 24
    down = plain(576, 1536, seed=4, dtype=dtype, device=DEVICE) / 39
    ids = torch.tensor([5, 7, 9], device=DEVICE)

    def chain(*, overlap: bool) -> torch.Tensor:
        rows = launch_embed_stream(ids, table, norm, overlap=overlap)
        for _ in range(12):
            gated = launch_scaled_linear(rows, gate_up, eps=EPS, is_gated=True, overlap=overlap)
            rows = launch_residual_linear(
                gated, down, residual_MD=rows.residual_MD, norm_D=norm, overlap=overlap
            )
        return rows.residual_MD

    eager = chain(overlap=False)
    assert same_bits(chain(overlap=True), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(overlap=True)
    for start in range(50):
        ids.copy_(torch.tensor([start, 7, 250 - start]))
        graph.replay()
        assert same_bits(captured, chain(overlap=False)), f"replay {start}"


def test_negative_control_a_sum_that_follows_the_rows_differs() -> None:
    x = adversarial(NUM_ROWS, 1536, seed=1, dtype=torch.bfloat16, device=DEVICE)
    residual = torch.zeros(NUM_ROWS, 576, dtype=torch.bfloat16, device=DEVICE)
    weight = adversarial(576, 1536, seed=2, dtype=torch.bfloat16, device=DEVICE)
    norm = torch.ones(576, dtype=torch.bfloat16, device=DEVICE)
    op = residual_op(weight, norm)

    def follow_rows(x_MK: torch.Tensor, residual_MD: torch.Tensor) -> torch.Tensor:
        if x_MK.shape[0] <= 8:
            return op(x_MK, residual_MD)[0]
        halves = residual_op(weight[:, :768].contiguous(), norm)(x_MK[:, :768], residual_MD)[0]
        return residual_op(weight[:, 768:].contiguous(), norm)(x_MK[:, 768:], halves)[0]

    with pytest.raises(AssertionError, match="differ"):
        assert_rows_independent(follow_rows, (x, residual), (2, 16, 33), seed=3)


@pytest.mark.parametrize("num_slots", [0, 1, 4, 8, 15])
def test_accept(num_slots: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    drafts = torch.randint(0, 2, (300, num_slots), generator=generator)
    chosen = torch.randint(0, 2, (300, num_slots + 1), generator=generator)
    num_drafts = torch.randint(0, num_slots + 1, (300,), generator=generator)
    got = kernels.accept(drafts.to(DEVICE), chosen.to(DEVICE), num_drafts.to(DEVICE))
    for found, expected in zip(got, accept_twin(drafts, chosen, num_drafts), strict=True):
        assert torch.equal(found.cpu(), expected)


LAYOUTS = [(9, 3, 64), (32, 8, 64), (32, 8, 128), (24, 1, 8)]  # H, G, P
LENGTHS = (1, 9, 130, 200, 255, 256, 258, 261, 530, 1_030)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dense_rows_have_the_bits_of_separate_kernels(
    layout: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    """Rotation, cache and attention of a round in one kernel; every width against single rows."""
    for width, overlap in ((1, False), (1, True), (5, False), (16, False)):
        dense = dense_requests(
            num_heads=layout[0], num_kv_heads=layout[1], head_dim=layout[2], width=width,
            lengths=LENGTHS, dtype=dtype, device=DEVICE,
        )  # fmt: skip
        fused_layer, fused = dense.attend(
            attention.launch_paged_attention, window=window, overlap=overlap
        )
        layer, separate = dense.attend_separately(attention, rope, kv_write, window=window)
        assert same_bits(fused, separate), f"W={width}: {differing(fused, separate)}"
        assert same_bits(fused_layer.k.nan_to_num(9.0), layer.k.nan_to_num(9.0))
        assert same_bits(fused_layer.v.nan_to_num(9.0), layer.v.nan_to_num(9.0))
        assert bool(fused.isfinite().all()), "poison came through"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_request_alone_has_the_bits_it_has_beside_others(
    layout: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Other requests lengthen the grid; fewer rows are a smaller BLOCK_M and one part."""
    dense = dense_requests(
        num_heads=layout[0], num_kv_heads=layout[1], head_dim=layout[2], width=8,
        lengths=LENGTHS, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    _, all_rows = dense.attend(attention.launch_paged_attention, window=None)
    for request in range(len(LENGTHS)):
        for width in (1, 3, 8):
            alone = dense.request(request, width)
            _, found = alone.attend(attention.launch_paged_attention, window=None)
            want = all_rows[request * 8 : request * 8 + width]
            assert same_bits(found, want), f"request {request} W={width}: {differing(found, want)}"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_dense_accuracy(dtype: torch.dtype) -> None:
    dense = dense_requests(
        num_heads=9, num_kv_heads=3, head_dim=64, width=5, lengths=LENGTHS, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    _, found = dense.attend(attention.launch_paged_attention, window=None)
    layer, _ = dense.attend_separately(attention, rope, kv_write, window=None)
    batch = dense.batch
    q, _ = rope.launch_apply_rope(dense.q, dense.k, batch.positions_N, dense.cos_sin)
    requests = PagedRequests(
        layer=layer, tables=batch.block_tables_BT, lengths=tuple(max(n, 5) for n in LENGTHS)
    )
    rows = list(zip(batch.row_request_N.tolist(), batch.positions_N.tolist(), strict=True))
    expected = attention_reference(q, requests, rows, scale=0.3, window=None)
    # Weights are rounded to the storage dtype before they meet values of size up to about 5; their
    # float32 scores, sums of 64 products, are off by at most 64 half steps of 2^-24 each.
    half = HALF_ULP[dtype]
    score_error = 64 * 2.0**-24 * 0.3 * float(
        q.double().norm(dim=-1).amax() * layer.k.double().nan_to_num(0.0).norm(dim=-1).amax()
    )  # fmt: skip
    atol = 5 * half + 5 * score_error
    torch.testing.assert_close(found.double(), expected, rtol=2 * half, atol=atol)


def test_a_value_that_overflows_reaches_later_rows_only() -> None:
    dense = dense_requests(
        num_heads=9, num_kv_heads=3, head_dim=64, width=4, lengths=(20, 300),
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    _, clean = dense.attend(attention.launch_paged_attention, window=None)
    dense.v[2, 0, 5] = float("inf")
    _, found = dense.attend(attention.launch_paged_attention, window=None)
    _, separate = dense.attend_separately(attention, rope, kv_write, window=None)
    assert same_bits(found[:2], clean[:2])
    assert same_bits(found[4:], clean[4:])
    assert bool(found[2:4, :3, 5].isnan().all())
    assert torch.equal(found.nan_to_num(7.0), separate.nan_to_num(7.0))
