"""What `runtime.kernels.aot` compiles of draws: from log weights, and from the logits of a round.

They read logits in float32 whatever a model's dtype is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from runtime.kernels.aot_cases import KernelCase
from runtime.kernels.cuda import draw, sample


def draw_cases(arch: int) -> tuple[KernelCase, ...]:
    """Return the cases for an architecture, in a fixed order."""
    overlap = {"OVERLAP": arch >= 90}
    return (*_sample_cases(overlap), *_draw_cases(overlap))


def _sample_cases(overlap: Mapping[str, bool]) -> Iterator[KernelCase]:
    for dtype, flags, ids in (("fp32", True, False), ("fp32", True, True), ("fp64", False, False)):
        constants = sample.sample_constants(0, has_flags=flags, has_ids=ids)
        tile = _case(sample.sample_tile_kernel, dtype, {**constants, **overlap})
        yield replace(tile, fuses_products=False)
        pick = sample.pick_constants(is_named=ids, is_copied=ids)
        yield _case(sample.sample_pick_kernel, dtype, {**pick, **overlap})


def _draw_cases(overlap: Mapping[str, bool]) -> Iterator[KernelCase]:
    """Draws of a round: of the target's rows, and of a draft's in a reduced vocabulary."""
    peaks = {"BLOCK": draw.PEAK_BLOCK, **overlap}
    yield _case(draw.peak_tile_kernel, "fp32", peaks, num_warps=8)
    for is_draft in (False, True):
        constants = draw.draw_constants(
            0, has_requests=not is_draft, has_slots=True, has_ids=is_draft
        )
        tile = _case(draw.draw_tile_kernel, "fp32", {**constants, **overlap})
        yield replace(tile, fuses_products=False)


def _case(
    kernel: Any, dtype: str, constants: Mapping[str, int | bool], *, num_warps: int = 4
) -> KernelCase:
    return KernelCase(
        kernel=kernel,
        dtype=dtype,
        out_dtype=dtype,
        constants=tuple(constants.items()),
        num_warps=num_warps,
        num_stages=3,
        is_hot=False,
    )
