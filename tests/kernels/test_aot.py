"""Every Triton kernel compiles for sm_90 without a GPU, fits, and spills nothing where hot."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

from runtime.kernels import aot, cuda
from runtime.kernels.aot_cases import KernelCase
from runtime.kernels.cuda import draw, filtered_draw, fused_linear, linear, sample

ARCH = 90
RECORD = Path(__file__).parent / "compiled_cases.txt"
PRODUCTS = (
    linear.linear_kernel,
    fused_linear.scaled_linear_kernel,
    fused_linear.residual_linear_kernel,
)
assert os.environ.get("TRITON_INTERPRET") != "1", "an interpreted kernel cannot be compiled"


def line_of(case: KernelCase) -> str:
    """Return the pinned sizes and flags of a case in one line."""
    sizes = [f"{key}={int(value)}" for key, value in case.constants]
    where = f"num_warps={case.num_warps} num_stages={case.num_stages}"
    return f"{case.kernel.__name__} {case.dtype}->{case.out_dtype} {' '.join(sizes)} {where}"


def cases_of_ci() -> list[KernelCase]:
    """Return one case of each kernel, a float32 one of each product, and what nobody compiled yet.

    The nightly script compiles all of them and keeps the list; a changed table entry is not in it.
    """
    known = set(RECORD.read_text("utf-8").splitlines())
    seen: set[tuple[str, bool]] = set()
    chosen = []
    for case in aot.kernel_cases(ARCH):
        key = case.kernel.__name__, case.kernel in PRODUCTS and case.dtype == "fp32"
        if key not in seen or line_of(case) not in known:
            chosen.append(case)
        seen.add(key)
    return chosen


def test_every_kernel_and_changed_table_entries_compile_and_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = cases_of_ci()
    assert {case.kernel for case in cases} == {case.kernel for case in aot.kernel_cases(ARCH)}
    check(cases, tmp_path, monkeypatch)


@pytest.mark.slow
def test_every_case_compiles_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPECCTL_RECORD_CASES=1 keeps the list of what was compiled."""
    cases = aot.kernel_cases(ARCH)
    check(cases, tmp_path, monkeypatch)
    lines = "".join(f"{line}\n" for line in sorted({line_of(case) for case in cases}))
    if os.environ.get("SPECCTL_RECORD_CASES") == "1":
        RECORD.write_text(lines, encoding="utf-8")
    assert RECORD.read_text("utf-8") == lines, "run again with SPECCTL_RECORD_CASES=1"


def check(cases: Sequence[KernelCase], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile cases and look at what came out."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    compiled = [aot.compile_case(case, ARCH) for case in cases]
    problems = [problem for one in compiled for problem in aot.failures(one, ARCH)]
    assert not problems, "\n".join(problems)
    products = [one for one in compiled if one.case.kernel in PRODUCTS]
    assert len({one.case.kernel for one in products}) == len(PRODUCTS)
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
    assert {case.kernel for case in cases} >= {
        draw.draw_tile_kernel,
        filtered_draw.border_kernel,
        sample.sample_tile_kernel,
    }
    for case in cases:
        assert "fma" not in aot.compile_case(case, ARCH).ptx, case.name


def test_the_list_holds_every_kernel() -> None:
    names = [f"{cuda.__name__}.{found.name}" for found in pkgutil.iter_modules(cuda.__path__)]
    modules = [importlib.import_module(name) for name in names]
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
