"""What `runtime.kernels.aot` compiles of draws: from log weights, and from the logits of a round.

They read logits in float32 whatever a model's dtype is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from runtime.kernels.aot_cases import KernelCase
from runtime.kernels.cuda import draw, filtered_draw, sample


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
    for num_bins in (0, filtered_draw.NUM_BINS):
        peaks = {**draw.peak_constants(num_bins=num_bins), **overlap}
        yield _case(draw.peak_tile_kernel, "fp32", peaks, num_warps=8)
    for is_draft in (False, True):
        constants = draw.draw_constants(
            0, has_requests=not is_draft, has_slots=True, has_ids=is_draft
        )
        kernels = [(draw.draw_tile_kernel, constants, 4)]
        kernels.append((filtered_draw.kept_tile_kernel, constants, 4))
        owners = {name: constants[name] for name in ("HAS_REQUESTS", "HAS_SLOTS")}
        weigh = {**owners, "BLOCK": constants["BLOCK"]}
        kernels.append((filtered_draw.weigh_tile_kernel, weigh, 4))
        border = {**owners, **filtered_draw.border_constants()}
        kernels.append((filtered_draw.border_kernel, border, filtered_draw.BORDER_WARPS))
        for kernel, own, num_warps in kernels:
            case = _case(kernel, "fp32", {**own, **overlap}, num_warps=num_warps)
            yield replace(case, fuses_products=False, is_hot=True)


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
