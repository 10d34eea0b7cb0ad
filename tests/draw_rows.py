"""Rows of logits and ways to choose from them that are hard on draws, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import RoundSampling
from runtime.graphs.slot_sampling import SamplingState, SlotSampling
from runtime.kernels.draw import of_rows
from runtime.spec.sampling import filter_columns, usable_temperature
from runtime.spec.types import SamplingParams
from tests.tiny_manifest import CPU

FILTERS: tuple[dict[str, float], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 0.2},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 2.5},
    {"top_p": 1.0 - 1e-12},
    {"min_p": 1.0},
    {"min_p": 0.03},
    {"top_k": 7, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.001},
    {"top_k": 30, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.02, "temperature": 1e300},
    {"top_k": 5, "top_p": 0.99, "temperature": 1e-300},
    {"top_k": 2, "top_p": 0.3, "temperature": 1e-4},
)


def slot_of(index: int, options: dict[str, float]) -> SlotSampling:
    params = SamplingParams(**{"temperature": 1.0, **options})  # type: ignore[arg-type]
    top_k, log_min_p, top_p = filter_columns(params)
    return SlotSampling(
        is_sampled=True, seed=index - 3, temperature=usable_temperature(params.temperature),
        top_k=top_k, log_min_p=log_min_p, top_p=top_p,
    )  # fmt: skip


def sampling_of(slots: Sequence[SlotSampling], device: torch.device = CPU) -> RoundSampling:
    """Return the slots as a round's requests, the last one first."""
    state = SamplingState(len(slots), device)
    state.write(range(len(slots)), slots)
    return state.select(torch.arange(len(slots), device=device).flip(0), has_filters=True)


def logits_of(num_rows: int, num_columns: int) -> torch.Tensor:
    """Return rows with ties, infinities, NaN, one value everywhere, and none that can be drawn."""
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(num_rows, num_columns, generator=generator) * 4
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[0, : num_columns // 2] = -torch.inf
    logits[1, 1::3] = torch.nan
    logits[2, num_columns // 3 :: 2] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 1.5
    logits[5] = torch.nan
    logits[6] *= 1e38
    return logits


def kept_by_borders(
    logits_MV: torch.Tensor, sampling: RoundSampling, request_M: torch.Tensor
) -> torch.Tensor:
    """Return the laws of rows that the kernels' borders stand for; needs triton."""
    from runtime.kernels.cuda.filtered_draw import launch_borders

    slots_B = sampling.slots_B
    assert slots_B is not None
    owners = {"HAS_REQUESTS": True, "HAS_SLOTS": True}
    scaled, border = launch_borders(
        logits_MV, sampling, request_M, slots_B, slots_B.shape[0], owners
    )
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    key = (scaled.view(torch.int32) & 0x7FFFFFFF).long() << 32 | ids
    lowest = of_rows(sampling, request_M).log_min_p_S[:, None]
    return torch.where((key <= border[:, None]) & (scaled >= lowest), scaled, -torch.inf)
