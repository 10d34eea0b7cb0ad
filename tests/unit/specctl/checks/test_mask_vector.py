"""The mask vector in a file of its own (vllm issue 46104): it is read, without executing it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specctl.contract.diagnostics import Diagnostic
from specctl.ops.convert import convert
from specctl.ops.load import load

torch = pytest.importorskip("torch", reason="torch writes the archives that are read here")

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
CLEAN = CHECKPOINTS / "zlab-dflash-mask-file"
FILE = "mask_embedding.pt"
HIDDEN, MASK = 10, 2
Put = Callable[[Any], tuple[Diagnostic, ...]]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Put an object, or bytes, in the place of the clean draft's vector; return its findings."""
    directory = tmp_path / "draft"
    shutil.copytree(CLEAN, directory)

    def use(value: Any) -> tuple[Diagnostic, ...]:
        stream = io.BytesIO()
        if not isinstance(value, bytes):
            torch.save(value, stream)
        (directory / FILE).write_bytes(value if isinstance(value, bytes) else stream.getvalue())
        found = load(str(directory)).diagnostics
        return tuple(d for d in found if FILE in d.where and d.code != "SD417")

    return use


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(HIDDEN, dtype=torch.bfloat16),
        torch.ones(1, HIDDEN),
        {"mask_token_id": MASK, "embedding": torch.ones(HIDDEN, dtype=torch.float16)},
        {"mask_token_id": torch.tensor(MASK), "embedding": torch.ones(HIDDEN)},
        {"embedding": torch.nn.Parameter(torch.ones(HIDDEN))},
    ],
)
def test_a_vector_of_the_right_width_is_accepted(put: Put, value: Any) -> None:
    assert put(value) == ()


def test_another_length_is_an_error_with_both_numbers(put: Put) -> None:
    (found,) = put(torch.ones(HIDDEN + 1))
    assert (found.code, found.severity) == ("SD322", "error")
    assert (found.expected, found.found) == (str(HIDDEN), str(HIDDEN + 1))
    assert found.where.endswith(f"{FILE}::embedding[{HIDDEN + 1} F32]")


def test_another_id_is_an_error_with_both_numbers(put: Put) -> None:
    (found,) = put({"mask_token_id": MASK + 1, "embedding": torch.ones(HIDDEN)})
    assert (found.code, found.severity) == ("SD322", "error")
    assert (found.expected, found.found) == (str(MASK), str(MASK + 1))
    assert "config.json#/dflash_config/mask_token_id" in found.message


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"no archive", "SD132"),
        (b"<!DOCTYPE html><html></html>", "SD106"),
        (torch.ones(2, HIDDEN), "SD322"),
        (torch.ones(HIDDEN, dtype=torch.int64), "SD322"),
        (torch.tensor(1.0), "SD322"),
        ([1.0] * HIDDEN, "SD322"),
        ({"weight": torch.ones(HIDDEN)}, "SD322"),
        ({}, "SD322"),
        ({"mask_token_id": "2", "embedding": torch.ones(HIDDEN)}, "SD132"),
        ({"embedding": torch.device("cpu")}, "SD103"),
    ],
)
def test_anything_else_is_an_error(put: Put, value: Any, code: str) -> None:
    (found,) = put(value)
    assert (found.code, found.severity) == (code, "error")


def test_a_wrong_vector_is_not_carried_on(tmp_path: Path) -> None:
    source = CHECKPOINTS / "zlab-dflash-mask-file-short"
    out = tmp_path / "out"
    options: dict[str, Any] = {
        "to": "zlab-dflash",
        "out": str(out),
        "target": str(CHECKPOINTS / "hf-llama-tiny"),
    }
    report = convert(str(source), **options)
    assert report.state == "refused"
    assert [d.code for d in report.diagnostics if d.severity == "error"] == ["SD322"]
    assert not out.exists()
