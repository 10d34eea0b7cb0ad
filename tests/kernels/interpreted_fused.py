"""The launchers of fused products and acceptance under the interpreter; see `interpreted.py`."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from runtime import kernels
from runtime.kernels.accept import accept_twin
from runtime.kernels.cuda import accept, attention, fused_linear, kv_write, rope, stream
from runtime.kernels.fused_linear import residual_linear_twin, scaled_linear_twin
from runtime.kernels.fused_table import FusedConfig
from runtime.kernels.row_tiles import row_tile
from runtime.kernels.stream import Stream, enter_stream_twin, num_square_tiles
from tests.kernels.dense import dense_requests
from tests.kernels.ladder import adversarial, assert_rows_independent, plain, same_bits
from tests.kernels.references import HALF_ULP

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

DTYPES = [torch.float32, torch.float16]
LOOP = FusedConfig(block_n=32, block_k=16, num_warps=4, num_stages=2)
PRELOAD = FusedConfig(block_n=16, block_k=16, num_warps=4, num_stages=2, preload=True)
PARTS = FusedConfig(block_n=16, block_k=16, num_warps=4, num_stages=2, parts=2)
EARLY_PARTS = FusedConfig(block_n=16, block_k=16, num_warps=8, num_stages=2, preload=True, parts=4)
CONFIGS = [None, LOOP, PRELOAD, PARTS, EARLY_PARTS]
CONFIG_NAMES = ["rule", "loop", "preload", "parts", "early-parts"]
PRODUCTS = [(32, 48, torch.float32), (48, 50, torch.float16), (24, 14, torch.float32)]
EPS = 1e-5


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with the twin: the same rounding points, float32 sums in another order."""
    torch.testing.assert_close(got, expected, rtol=2 * HALF_ULP[got.dtype] + 1e-5, atol=2e-5)


def close_streams(got: Stream, expected: Stream) -> None:
    close(got.residual_MD, expected.residual_MD)
    torch.testing.assert_close(
        got.weighted_MD, expected.weighted_MD, rtol=4 * HALF_ULP[got.weighted_MD.dtype], atol=1e-5
    )
    rtol = 1e-5 if got.residual_MD.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.squares_MT, expected.squares_MT, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 48, 80])
def test_stream_entries(width: int, dtype: torch.dtype) -> None:
    x = plain(5, width, seed=1, dtype=dtype)
    norm = plain(width, seed=2, dtype=dtype)
    expected = enter_stream_twin(x, norm)
    got = stream.launch_enter_stream(x, norm)
    assert same_bits(got.weighted_MD, expected.weighted_MD)
    assert got.squares_MT.shape == (5, num_square_tiles(width))
    close_streams(got, expected)
    ids = torch.tensor([3, 0, 3])
    embedded = stream.launch_embed_stream(ids, x, norm)
    assert same_bits(embedded.residual_MD, x[ids])
    assert same_bits(embedded.weighted_MD, got.weighted_MD[ids])
    assert same_bits(embedded.squares_MT, got.squares_MT[ids])


@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
@pytest.mark.parametrize(("features", "columns", "dtype"), PRODUCTS)
def test_scaled_linear(
    features: int, columns: int, config: FusedConfig | None, dtype: torch.dtype
) -> None:
    rows = enter_stream_twin(
        plain(19, features, seed=1, dtype=dtype), plain(features, seed=2, dtype=dtype)
    )
    weight = plain(columns, features, seed=3, dtype=dtype)
    bias = plain(columns, seed=4, dtype=dtype)
    for bias_N in (None, bias):
        for is_gated in (False, True):
            got = fused_linear.launch_scaled_linear(
                rows, weight, bias_N, eps=EPS, is_gated=is_gated, config=config
            )
            close(got, scaled_linear_twin(rows, weight, bias_N, eps=EPS, is_gated=is_gated))


@pytest.mark.parametrize("config", CONFIGS, ids=CONFIG_NAMES)
@pytest.mark.parametrize(("features", "columns", "dtype"), PRODUCTS)
def test_residual_linear(
    features: int, columns: int, config: FusedConfig | None, dtype: torch.dtype
) -> None:
    x = plain(19, features, seed=1, dtype=dtype)
    weight = plain(columns, features, seed=2, dtype=dtype)
    shared = {
        "residual_MD": plain(19, columns, seed=3, dtype=dtype),
        "norm_D": plain(columns, seed=4, dtype=dtype),
    }
    for bias in (None, plain(columns, seed=5, dtype=dtype)):
        got = fused_linear.launch_residual_linear(x, weight, bias, **shared, config=config)
        close_streams(got, residual_linear_twin(x, weight, bias, **shared))
        entered = stream.launch_enter_stream(got.residual_MD, shared["norm_D"])
        assert same_bits(entered.weighted_MD, got.weighted_MD)
        assert same_bits(entered.squares_MT, got.squares_MT)


@pytest.mark.parametrize("config", CONFIGS[1:], ids=CONFIG_NAMES[1:])
def test_rows(config: FusedConfig) -> None:
    x = adversarial(20, 32, seed=1, dtype=torch.float32)
    weight = adversarial(48, 32, seed=2, dtype=torch.float32)
    norm = plain(48, seed=3, dtype=torch.float32)
    back = adversarial(24, 48, seed=4, dtype=torch.float32)
    residual = adversarial(20, 48, seed=5, dtype=torch.float32)

    def layer(x_MK: torch.Tensor, residual_MD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = fused_linear.launch_residual_linear(
            x_MK, weight, residual_MD=residual_MD, norm_D=norm, config=config
        )
        out = fused_linear.launch_scaled_linear(made, back, eps=EPS, is_gated=True, config=config)
        return made.residual_MD, made.weighted_MD, made.squares_MT, out

    assert_rows_independent(layer, (x, residual), (2, 16, 17, 20), seed=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS[1:], ids=CONFIG_NAMES[1:])
def test_every_number_of_rows_has_the_bits_of_one(config: FusedConfig, dtype: torch.dtype) -> None:
    """Every BLOCK_M, whole and partial; one configuration takes every count from 1 to 64."""
    most = 257
    x = adversarial(most, 32, seed=1, dtype=dtype)
    residual = adversarial(most, 16, seed=2, dtype=dtype)
    weight = adversarial(16, 32, seed=3, dtype=dtype)
    norm = plain(16, seed=4, dtype=dtype)

    def products(count: int) -> tuple[torch.Tensor, ...]:
        made = fused_linear.launch_residual_linear(
            x[:count], weight, residual_MD=residual[:count], norm_D=norm, config=config
        )
        out = fused_linear.launch_scaled_linear(made, weight.t().contiguous(), eps=EPS)
        return made.residual_MD, made.weighted_MD, made.squares_MT, out

    expected = products(most)
    is_thorough = config is EARLY_PARTS and dtype == torch.float16
    some = range(1, 65) if is_thorough else (1, 16, 17, 33, 64, 65)
    for count in (*some, 100, most):
        for found, wanted in zip(products(count), expected, strict=True):
            assert same_bits(found, wanted[:count]), f"{count} rows"


def test_more_parts_than_steps_add_zeros() -> None:
    x = plain(3, 24, seed=1, dtype=torch.float32)
    weight = plain(16, 24, seed=2, dtype=torch.float32)
    rows = enter_stream_twin(x, torch.ones(24))
    close(
        fused_linear.launch_scaled_linear(rows, weight, eps=EPS, config=EARLY_PARTS),
        scaled_linear_twin(rows, weight, eps=EPS),
    )


@pytest.mark.parametrize(("parts", "features"), [(1, 96), (2, 96), (4, 576), (8, 288)])
def test_a_prefill_sums_parts_in_turn_to_the_same_bits(
    parts: int, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows share a program; parts beyond the steps of K are empty in either form."""
    monkeypatch.setattr("runtime.kernels.row_tiles._LEAST_PROGRAMS", 1)
    num_rows, columns = 260, 80
    config = FusedConfig(block_n=16, block_k=32, num_warps=8, num_stages=2, parts=parts)
    assert row_tile("residual", config, columns, features, num_rows, element_bytes=4).in_turn
    x = plain(num_rows, features, seed=1, dtype=torch.float32)
    residual = plain(num_rows, columns, seed=4, dtype=torch.float32)
    op = functools.partial(
        fused_linear.launch_residual_linear,
        weight_DK=plain(columns, features, seed=2, dtype=torch.float32),
        norm_D=plain(columns, seed=3, dtype=torch.float32),
        config=config,
    )
    whole = op(x, residual_MD=residual)
    for first in (0, 70, 215):
        rows = slice(first, first + 45)
        part = op(x[rows], residual_MD=residual[rows])
        assert same_bits(part.residual_MD, whole.residual_MD[rows])
        assert same_bits(part.squares_MT, whole.squares_MT[rows])


def test_gate_and_up_alternate() -> None:
    gate, up = plain(6, 16, seed=1, dtype=torch.float32), plain(6, 16, seed=2, dtype=torch.float32)
    rows = enter_stream_twin(plain(3, 16, seed=3, dtype=torch.float32), torch.ones(16))
    product = functools.partial(fused_linear.launch_scaled_linear, rows, eps=EPS)
    got = product(kernels.interleave(gate, up), is_gated=True)
    close(got, torch.nn.functional.silu(product(gate)) * product(up))


@pytest.mark.parametrize("num_slots", [0, 1, 3, 5])
def test_accept(num_slots: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    drafts = torch.randint(0, 2, (40, num_slots), generator=generator)
    chosen = torch.randint(0, 2, (40, num_slots + 1), generator=generator)
    num_drafts = torch.randint(0, num_slots + 1, (40,), generator=generator, dtype=torch.int32)
    got = accept.launch_accept(drafts, chosen, num_drafts)
    for found, expected in zip(got, accept_twin(drafts, chosen, num_drafts), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "width", "lengths", "window"),
    [
        (6, 2, 24, 5, (40, 7), None),
        (3, 1, 16, 1, (1, 30), None),
        (4, 2, 16, 3, (258, 300), None),  # new keys on both sides of a segment's end
        (4, 2, 16, 3, (258, 40), 20),
        (24, 1, 8, 5, (20, 9), None),  # more heads times rows than one product packs
    ],
)
def test_dense_rows_have_the_bits_of_separate_kernels(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    width: int,
    lengths: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    dense = dense_requests(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, width=width,
        lengths=lengths, dtype=dtype,
    )  # fmt: skip
    fused_layer, fused = dense.attend(attention.launch_paged_attention, window=window)
    layer, separate = dense.attend_separately(attention, rope, kv_write, window=window)
    assert same_bits(fused, separate)
    assert same_bits(fused_layer.k.nan_to_num(9.0), layer.k.nan_to_num(9.0))
    assert same_bits(fused_layer.v.nan_to_num(9.0), layer.v.nan_to_num(9.0))
    _, twin = dense.attend_separately(None, None, None, window=window)
    torch.testing.assert_close(fused, twin, rtol=4 * HALF_ULP[dtype], atol=2e-5 + HALF_ULP[dtype])


def test_a_value_that_overflows_reaches_later_rows_only() -> None:
    dense = dense_requests(
        num_heads=2, num_kv_heads=1, head_dim=16, width=4, lengths=(20,), dtype=torch.float32
    )
    _, clean = dense.attend(attention.launch_paged_attention, window=None)
    dense.v[2, 0, 5] = float("inf")
    _, found = dense.attend(attention.launch_paged_attention, window=None)
    _, separate = dense.attend_separately(attention, rope, kv_write, window=None)
    assert same_bits(found[:2], clean[:2])
    assert torch.equal(found[2:].isnan().nonzero()[:, 2].unique(), torch.tensor([5]))
    assert torch.equal(found.nan_to_num(7.0), separate.nan_to_num(7.0))


def test_a_stream_is_written_beside_others() -> None:
    x, weight, residual, norm = (
        plain(*shape, seed=seed, dtype=torch.float32)
        for seed, shape in enumerate(((7, 16), (24, 16), (7, 24), (24,)))
    )
    beside = torch.full((7, 3 * 24), -1.0)
    first, second, third = beside.split(24, dim=1)
    add = functools.partial(fused_linear.launch_residual_linear, x, weight, norm_D=norm)
    alone = add(residual_MD=residual)
    made = add(residual_MD=residual, out_MD=second)
    assert made.residual_MD.data_ptr() == second.data_ptr()
    again, expected = add(residual_MD=second), add(residual_MD=alone.residual_MD)
    entered = stream.launch_enter_stream(second, norm)
    for name in Stream.__slots__:
        assert same_bits(getattr(made, name), getattr(alone, name)), name
        assert same_bits(getattr(again, name), getattr(expected, name)), name
        assert same_bits(getattr(entered, name), getattr(alone, name)), name
    ids = torch.tensor([3, 0, 3, 1, 2, 2, 6])
    embedded = stream.launch_embed_stream(ids, alone.residual_MD, norm, out_MD=first)
    assert same_bits(first, alone.residual_MD[ids])
    assert same_bits(embedded.weighted_MD, alone.weighted_MD[ids])
    assert (third == -1).all()
