"""The pinned tiles: functions of the weight, the element size and the architecture alone."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels import gemm_table
from runtime.kernels.gemm_table import (
    BLOCK_M_CHOICES,
    GemmConfig,
    block_m_for,
    gemm_config,
    gemm_table_digest,
    head_config,
    is_tabled,
)

features = st.integers(1, 32_768)
columns = st.integers(1, 262_144)
element_bytes = st.sampled_from([2, 4])
archs = st.sampled_from([80, 86, 89, 90, 100, 120, 75])


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@settings(deadline=None, max_examples=200)
@given(columns=columns, features=features, element_bytes=element_bytes, arch=archs)
def test_every_shape_has_a_usable_tile(
    columns: int, features: int, element_bytes: int, arch: int
) -> None:
    for config in (
        gemm_config(columns, features, element_bytes=element_bytes, arch=arch),
        head_config(columns, features, element_bytes=element_bytes, arch=arch),
    ):
        assert is_power_of_two(config.block_n)
        assert is_power_of_two(config.block_k)
        assert config.block_n >= 16
        assert config.block_k >= 16
        # No part of K is empty: the last one still starts inside K.
        steps = -(-features // config.block_k)
        per_part = -(-steps // config.split_k)
        assert (config.split_k - 1) * per_part < steps
        rows = BLOCK_M_CHOICES[-1] + config.block_n
        pipeline = rows * config.block_k * element_bytes * config.num_stages
        assert pipeline <= (196_608 if arch in (90, 100) else 98_304)


@settings(deadline=None, max_examples=100)
@given(
    first=columns, second=columns, features=features, element_bytes=element_bytes,
    arch=st.sampled_from([80, 90]),
)  # fmt: skip
def test_heads_of_one_width_sum_in_one_order(
    first: int, second: int, features: int, element_bytes: int, arch: int
) -> None:
    a = head_config(first, features, element_bytes=element_bytes, arch=arch)
    b = head_config(second, features, element_bytes=element_bytes, arch=arch)
    assert (a.block_k, a.split_k) == (b.block_k, b.split_k) == (a.block_k, 1)


def test_the_row_count_reaches_block_m_only() -> None:
    assert [block_m_for(m) for m in (1, 16, 17, 32, 33, 64, 65, 50_000)] == [
        16, 16, 32, 32, 64, 64, 64, 64,
    ]  # fmt: skip
    for chooser in (gemm_config, head_config):
        assert list(inspect.signature(chooser).parameters) == [
            "out_features", "in_features", "element_bytes", "arch",
        ]  # fmt: skip


def test_the_table_serves_its_architecture_and_element_size_only() -> None:
    assert is_tabled(576, 1536, element_bytes=2, arch=90)
    assert not is_tabled(576, 1536, element_bytes=4, arch=90)
    assert not is_tabled(576, 1536, element_bytes=2, arch=80)
    assert not is_tabled(577, 1536, element_bytes=2, arch=90)
    tuned = gemm_config(576, 1536, element_bytes=2, arch=90)
    assert tuned == GemmConfig(block_n=32, block_k=128, split_k=4)


def test_the_digest_follows_every_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gemm_table_digest()
    assert before == gemm_table_digest()
    assert before.startswith("sha256:")
    monkeypatch.setitem(
        gemm_table._TABLE, (576, 576), GemmConfig(block_n=16, block_k=128, split_k=1)
    )
    changed = gemm_table_digest()
    assert changed != before
    monkeypatch.setattr(gemm_table, "ATTENTION_TILE", 32)
    narrow = gemm_table_digest()
    assert narrow not in (before, changed)
    monkeypatch.setattr(gemm_table, "SEGMENT_RULE", ((1 << 20, 1024),))
    assert gemm_table_digest() not in (before, changed, narrow)
