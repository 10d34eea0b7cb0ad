"""Every Triton kernel compiles for sm_90 without a GPU, fits, and spills nothing where hot."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

from runtime.kernels import aot
from runtime.kernels.cuda import (
    accept,
    activation,
    attention,
    fused_linear,
    head,
    head_rows,
    kv_write,
    linear,
    norm,
    rope,
    sample,
    stream,
)
from runtime.kernels.cuda import round as round_ends

ARCH = 90
assert os.environ.get("TRITON_INTERPRET") != "1", "an interpreted kernel cannot be compiled"


def test_every_kernel_compiles_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = [aot.compile_case(case, ARCH) for case in aot.kernel_cases(ARCH)]
    problems = [problem for one in compiled for problem in aot.failures(one, ARCH)]
    assert not problems, "\n".join(problems)
    kernels = (
        linear.linear_kernel,
        fused_linear.scaled_linear_kernel,
        fused_linear.residual_linear_kernel,
    )
    products = [one for one in compiled if one.case.kernel in kernels]
    for one in products:
        is_tensor_core = "mma.sync" in one.ptx or "wgmma" in one.ptx
        assert is_tensor_core == (one.case.dtype != "fp32"), one.case.name
        # IEEE float32 products: no tf32 anywhere.
        assert "tf32" not in one.ptx, one.case.name
    for one in compiled:
        if dict(one.case.constants).get("OVERLAP"):
            before, found, _ = one.ptx.partition("griddepcontrol.wait")
            assert found, f"{one.case.name} never waits"
            assert not re.search(r"\b(st\.global|atom\.|red\.)", before), one.case.name


def test_noise_is_made_without_fused_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product and a sum with one rounding would give other bits than the twin."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cases = [case for case in aot.kernel_cases(ARCH) if not case.fuses_products]
    assert {case.kernel for case in cases} >= {sample.sample_tile_kernel}
    for case in cases:
        assert "fma" not in aot.compile_case(case, ARCH).ptx, case.name


def test_the_list_holds_every_kernel() -> None:
    modules = (
        accept, activation, attention, fused_linear, head, head_rows, kv_write, linear, norm, rope,
        sample, stream, round_ends,
    )  # fmt: skip
    defined = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    listed = {case.kernel.__name__ for case in aot.kernel_cases(ARCH)}
    assert listed == defined


def test_a_tile_that_does_not_fit_is_reported() -> None:
    case = aot.kernel_cases(ARCH)[0]
    too_large = aot.CompiledCase(
        case=case, shared_bytes=232_449, registers=64, spill_bytes=8, ptx=""
    )
    found = aot.failures(too_large, ARCH)
    assert len(found) == 2
    assert "232449 B shared, limit 232448" in found[0]
    assert "8 B spilled" in found[1]
