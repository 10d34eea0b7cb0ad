"""Ladder steps 2 and 3 on the CPU: a row's bits do not depend on the rows beside it.

Every comparison is `torch.equal`. The negative control swaps a product for one whose K split
follows the rows and must break the equality, which shows that these tests can fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.invariance import (
    MOST,
    RESIDUAL_LINEAR,
    draft_mismatches,
    layer_mismatches,
    prefill_mismatches,
    row_dependent_residual_linear,
    verify_mismatches,
)
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import CPU, load_tiny, tiny_manifest

DTYPES = [torch.float32, torch.bfloat16]
LAYER_ROWS = (2, 3, 5, 8, 16, 24)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("invariance")
    target = write_tiny_target(root / "target", "qwen3")
    return target, write_tiny_eagle3(root / "draft", target, num_layers=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_equal_single_steps(directories: tuple[Path, Path], dtype: torch.dtype) -> None:
    model = load_tiny(tiny_manifest(directories[0]), dtype=dtype).target
    assert verify_mismatches(model, prefix=29, row_counts=range(1, MOST + 1)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_across_a_key_segment(
    directories: tuple[Path, Path], dtype: torch.dtype
) -> None:
    """Rows on both sides of position 256, where attention begins another segment of keys."""
    model = load_tiny(tiny_manifest(directories[0]), dtype=dtype).target
    assert verify_mismatches(model, prefix=250, row_counts=(1, 2, 5, 9, 17)) == []


def test_verify_rows_in_a_sliding_window(tmp_path: Path) -> None:
    directory = write_tiny_target(tmp_path, "mistral", sliding_window=20)
    model = load_tiny(tiny_manifest(directory)).target
    assert verify_mismatches(model, prefix=40, row_counts=(1, 2, 5, 9, 17, 33)) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_rows_equal_single_steps(
    directories: tuple[Path, Path], dtype: torch.dtype
) -> None:
    model = load_tiny(tiny_manifest(directories[0]), dtype=dtype).target
    assert prefill_mismatches(model, chunks=(7, 16, 33, MOST), length=MOST) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draft_rows_equal_single_entries(
    directories: tuple[Path, Path], dtype: torch.dtype
) -> None:
    draft = load_tiny(tiny_manifest(*directories), dtype=dtype).draft
    assert draft is not None
    assert draft_mismatches(draft, chunks=(2, 5, 16, 17, MOST)) == []


def test_free_blocks_may_hold_nan(directories: tuple[Path, Path]) -> None:
    model = load_tiny(tiny_manifest(directories[0])).target
    assert verify_mismatches(model, prefix=29, row_counts=(1, 4, 8), is_poisoned=True) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_of_real_size_is_row_invariant(dtype: torch.dtype) -> None:
    assert layer_mismatches(dtype, CPU, row_counts=LAYER_ROWS) == []


def test_negative_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a K split that follows M the same comparison finds differing rows."""
    monkeypatch.setattr(RESIDUAL_LINEAR, row_dependent_residual_linear)
    assert layer_mismatches(torch.float32, CPU, row_counts=LAYER_ROWS) != []
