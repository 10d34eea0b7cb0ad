"""The start-up probes: they pass on this machine and see a product that breaks the rule."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels import attention as attention_module
from runtime.kernels import attention_invariance_probe, probe, row_invariance_probe


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_this_machine_honours_the_contract(dtype: torch.dtype) -> None:
    found = row_invariance_probe(torch.randn(960, 576).to(dtype))
    name = str(dtype).removeprefix("torch.")
    assert found.product == f"{name} product of 960 x 576"
    assert found.is_invariant
    assert found.largest_difference == 0.0
    assert row_invariance_probe(torch.randn(2100, 576).to(dtype), is_head=True).is_invariant
    heads = attention_invariance_probe(
        num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype, device=torch.device("cpu")
    )
    assert heads.product == f"{name} attention of 9 query and 3 key heads of 64"
    assert heads.is_invariant


def test_a_product_that_follows_the_row_count_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t() + (1e-3 if x.shape[0] == 1 else 0.0)

    monkeypatch.setattr(probe, "linear", broken)
    found = row_invariance_probe(torch.randn(24, 16))
    assert not found.is_invariant
    assert found.largest_difference == pytest.approx(1e-3, rel=0.1)


def test_a_nan_in_one_place_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t() * (float("nan") if x.shape[0] == 1 else 1.0)

    monkeypatch.setattr(probe, "linear", broken)
    found = row_invariance_probe(torch.randn(24, 16))
    assert not found.is_invariant
    assert found.largest_difference == float("inf")


def test_weights_of_nan_are_no_fault_of_the_product() -> None:
    assert row_invariance_probe(torch.full((24, 16), float("nan"))).is_invariant


def test_attention_that_follows_the_row_count_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_module.paged_attention_twin

    def broken(q: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return whole(q, *args, **kwargs) * (1.5 if q.shape[0] == 1 else 1.0)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_module, "paged_attention_twin", broken)
    found = attention_invariance_probe(
        num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=torch.device("cpu")
    )
    assert not found.is_invariant
