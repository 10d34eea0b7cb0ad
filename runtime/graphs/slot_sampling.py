"""How the requests in slots choose tokens: written by the host when they join, read by rounds.

Legend: S slots, the last one for padding; B requests of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runtime.batch import RoundSampling, on_device
from runtime.kernels.law import KEEPS_ALL, MASKED

_MASK_32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSampling:
    """One request's way to choose tokens; the defaults are greedy.

    Args:
        seed: taken modulo 2**64.
        choice_index: index among the choices of one request.
        temperature: above 0; 1 for greedy.
        top_k: `KEEPS_ALL` keeps all.
        log_min_p: -inf keeps all.
        top_p: 1 keeps all.
    """

    is_sampled: bool = False
    seed: int = 0
    choice_index: int = 0
    temperature: float = 1.0
    top_k: int = KEEPS_ALL
    log_min_p: float = MASKED
    top_p: float = 1.0


GREEDY = SlotSampling()


class SamplingState:
    """Device tensors of all slots; allocated once, so captured graphs may keep their addresses."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        """Start with every slot greedy.

        Args:
            num_rows: slots, padding included.
            device: of the models.
        """

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        self._device = device
        self._known = [GREEDY] * num_rows  # what the columns hold
        self._columns = RoundSampling(
            is_sampled_S=column(0, torch.bool),
            seed_low_S=column(0, torch.int64),
            seed_high_S=column(0, torch.int64),
            choice_index_S=column(0, torch.int64),
            temperature_S=column(1.0, torch.float32),
            top_k_S=column(KEEPS_ALL, torch.int64),
            log_min_p_S=column(MASKED, torch.float32),
            top_p_S=column(1.0, torch.float64),
            slots_B=None,
            has_filters=False,
        )

    def write(self, slots: Sequence[int], rows: Sequence[SlotSampling]) -> None:
        """Set slots; those that hold the same already cost no copy.

        Sync: none.
        """
        new = {slot: row for slot, row in zip(slots, rows, strict=True) if row != self._known[slot]}
        if not new:
            return
        for slot, row in new.items():
            self._known[slot] = row
        rows = tuple(new.values())
        seeds = [row.seed % 2**64 for row in rows]
        values: dict[str, Sequence[float]] = {
            "is_sampled_S": [row.is_sampled for row in rows],
            "seed_low_S": [seed & _MASK_32 for seed in seeds],
            "seed_high_S": [seed >> 32 for seed in seeds],
            "choice_index_S": [row.choice_index for row in rows],
            "temperature_S": [row.temperature for row in rows],
            "top_k_S": [row.top_k for row in rows],
            "log_min_p_S": [row.log_min_p for row in rows],
            "top_p_S": [row.top_p for row in rows],
        }
        index = on_device(list(new), device=self._device)
        for name, numbers in values.items():
            column: torch.Tensor = getattr(self._columns, name)
            copied = on_device(numbers, device=self._device, dtype=column.dtype)
            column.index_copy_(0, index, copied)

    def select(self, slots_B: torch.Tensor, *, has_filters: bool) -> RoundSampling:
        """Return how a round's requests choose; the columns are these, read by slot.

        Sync: none.
        """
        return replace(self._columns, slots_B=slots_B, has_filters=has_filters)
