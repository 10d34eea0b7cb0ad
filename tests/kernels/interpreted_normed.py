"""Products that take in the norm of their rows under the interpreter; see `interpreted.py`."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from runtime import kernels
from runtime.kernels.cuda import head, head_rows, joined_linear, normed_rows, stream
from runtime.kernels.fused_table import FusedConfig
from runtime.kernels.head import head_argmax_twin, head_logits_twin
from runtime.kernels.joined_linear import RowHalf, joined_linear_twin
from runtime.kernels.norm import RowNorm, weigh_rows_twin
from runtime.kernels.stream import enter_stream_twin
from tests.kernels.ladder import adversarial, assert_rows_independent, plain, same_bits
from tests.kernels.references import HALF_ULP

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

DTYPES = [torch.float32, torch.float16]


def norm_of(width: int, dtype: torch.dtype, *, seed: int = 4) -> RowNorm:
    return RowNorm(weight_D=plain(width, seed=seed, dtype=dtype), eps=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_of_rows(dtype: torch.dtype) -> None:
    x = plain(19, 40, seed=1, dtype=dtype)
    norm = norm_of(40, dtype)
    entered = stream.launch_enter_stream(x, norm.weight_D)
    expected, expected_scale = weigh_rows_twin(x, norm)
    assert same_bits(entered.weighted_MD, expected)
    scale = normed_rows.launch_row_scales(entered, norm.eps)
    torch.testing.assert_close(scale[:, None], expected_scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_s_choice_has_the_bits_of_its_logits(dtype: torch.dtype) -> None:
    x = plain(19, 40, seed=1, dtype=dtype)
    weight = plain(70, 40, seed=2, dtype=dtype)
    weight[[3, 41, 66]] = weight[[20, 20, 20]]  # ties within a tile and across tiles
    norm = norm_of(40, dtype)
    logits = head.launch_head_logits(x, weight, norm)
    torch.testing.assert_close(logits, head_logits_twin(x, weight, norm), rtol=1e-5, atol=1e-5)
    ids, best = head.launch_head_argmax(x, weight, norm)
    assert same_bits(best, logits.amax(dim=1))
    assert torch.equal(ids, head_argmax_twin(x, weight, norm)[0])
    for count in (1, 16):
        few_ids, few_best = head.launch_head_argmax(x[:count], weight, norm)
        assert same_bits(few_best, best[:count])
        assert torch.equal(few_ids, ids[:count])
        assert same_bits(head.launch_head_logits(x[:count], weight, norm), logits[:count])
    entered = stream.launch_enter_stream(x, norm.weight_D)
    assert same_bits(head.launch_head_logits(entered, weight, norm), logits)
    names, wide = torch.arange(70) * 3 + 1, torch.zeros((19, 3), dtype=torch.int64)
    for rows in (x, entered):
        wide.fill_(-1)
        found, found_best = head.launch_head_argmax(
            rows, weight, norm, names_V=names, copy_M=wide[:, 1]
        )
        assert same_bits(found_best, best)
        assert torch.equal(found, names[ids])
        assert torch.equal(wide, torch.stack([found * 0 - 1, found, found * 0 - 1], dim=1))
    assert torch.equal(head.launch_logits_argmax(logits, names, None), names[ids])
    twin, twin_best = head_argmax_twin(enter_stream_twin(x, norm.weight_D), weight, norm)
    assert torch.equal(twin, ids)
    assert same_bits(twin_best, head_argmax_twin(x, weight, norm)[1])
    named = kernels.NamedRows(weight_VD=weight, ids_SE=torch.arange(70).repeat(4, 1))
    named_ids, named_best = head_rows.launch_head_rows_argmax(x[:4], named, norm)
    assert same_bits(named_best, best[:4])
    assert torch.equal(named_ids, ids[:4])


def test_rows_of_a_normed_head() -> None:
    x = adversarial(20, 40, seed=1, dtype=torch.float32)
    norm = norm_of(40, torch.float32)
    weight = plain(40, 40, seed=2, dtype=torch.float32)
    for launch in (head.launch_head_logits, head.launch_head_argmax):
        op = functools.partial(launch, weight_VD=weight, norm=norm)
        assert_rows_independent(op, (x,), (2, 16, 17, 20), seed=3)


def test_a_normed_head_is_a_norm_and_a_head() -> None:
    x = plain(5, 40, seed=1, dtype=torch.float32)
    weight = plain(30, 40, seed=2, dtype=torch.float32)
    norm = norm_of(40, torch.float32)
    expected = kernels.rms_norm(x, norm.weight_D, norm.eps).double() @ weight.double().t()
    for logits in (head.launch_head_logits(x, weight, norm), head_logits_twin(x, weight, norm)):
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("flags", ["gather norm norm bias", "norm", "gather", ""])
def test_joined_halves(flags: str, dtype: torch.dtype) -> None:
    table = plain(11, 40, seed=1, dtype=dtype)
    ids = torch.arange(19) * 5 % 11
    first = RowHalf(
        rows_XD=table if "gather" in flags else table[ids],
        ids_M=ids if "gather" in flags else None,
        norm=norm_of(40, dtype) if "norm" in flags else None,
    )
    second = RowHalf(
        rows_XD=plain(19, 50, seed=5, dtype=dtype)[:, 10:],
        norm=norm_of(40, dtype, seed=6) if "norm norm" in flags else None,
    )
    weight = plain(30, 80, seed=2, dtype=dtype)
    bias = plain(30, seed=3, dtype=dtype) if "bias" in flags else None
    got = joined_linear.launch_joined_linear(first, second, weight, bias)
    twin = joined_linear_twin(first, second, weight, bias)
    torch.testing.assert_close(got, twin, rtol=2 * HALF_ULP[dtype] + 1e-5, atol=1e-5)
    swapped = torch.cat((weight[:, 40:], weight[:, :40]), dim=1)
    other = joined_linear.launch_joined_linear(second, first, swapped, bias)
    torch.testing.assert_close(other, twin, rtol=2 * HALF_ULP[dtype] + 1e-5, atol=1e-5)


@pytest.mark.parametrize("block_n", [16, 32])
def test_rows_of_joined_halves(block_n: int) -> None:
    first = adversarial(20, 40, seed=1, dtype=torch.float32)
    second = adversarial(20, 40, seed=7, dtype=torch.float32)
    weight = plain(40, 80, seed=2, dtype=torch.float32)
    norms = norm_of(40, torch.float32), norm_of(40, torch.float32, seed=6)

    def op(first: torch.Tensor, second: torch.Tensor, block_n: int = block_n) -> torch.Tensor:
        return joined_linear.launch_joined_linear(
            RowHalf(rows_XD=first, norm=norms[0]),
            RowHalf(rows_XD=second, norm=norms[1]),
            weight,
            config=FusedConfig(block_n=block_n, block_k=32, num_warps=4, num_stages=2),
        )

    assert_rows_independent(op, (first, second), (2, 16, 17, 20), seed=3)
    assert same_bits(op(first, second), op(first, second, 16))
