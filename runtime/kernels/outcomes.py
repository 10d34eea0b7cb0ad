"""What a round tells the host, stored by one kernel where the host reads it.

Legend: B requests, X columns of the output, G drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutcomeTensors:
    """The outcomes of as many requests as a round may have; all are contiguous.

    Args:
        output_BX: int64, accepted drafts, then the target's choice at each row.
        num_counted_B: int64, drafts that counted; None: all that were asked for.
        confidence_BG: float32, the draft's chances for its drafts; None: it has none.
    """

    output_BX: torch.Tensor
    num_counted_B: torch.Tensor | None = None
    confidence_BG: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return those that exist, in the order of the fields."""
        all_of_them = (self.output_BX, self.num_counted_B, self.confidence_BG)
        return tuple(tensor for tensor in all_of_them if tensor is not None)


def outcome_store(source: OutcomeTensors, target: OutcomeTensors) -> Callable[[int], None]:
    """Return what copies the outcomes of the first requests; it takes their number.

    What it copied may be read once an event that was recorded after the call is complete.

    Args:
        source: of the device.
        target: of the same shapes; of a CUDA device in pinned memory, which the kernel writes.

    Exactness: a copy.
    Sync: none. On CUDA the kernel is compiled here, not at the first round.
    Graph-safe: yes, what is returned (CUDA).
    """
    shapes = [[tensor.shape for tensor in one.tensors()] for one in (source, target)]
    assert shapes[0] == shapes[1], "a copy changes no shape"
    both = (*source.tensors(), *target.tensors())
    assert all(tensor.is_contiguous() for tensor in both), "rows are copied in one piece"
    if source.output_BX.is_cuda:
        from runtime.kernels.cuda.outcomes import prepare_outcome_store

        return prepare_outcome_store(source, target)
    return functools.partial(store_outcomes_twin, source, target)


def store_outcomes_twin(source: OutcomeTensors, target: OutcomeTensors, num_rows: int) -> None:
    """Copy the first requests with torch."""
    for found, copied in zip(source.tensors(), target.tensors(), strict=True):
        copied[:num_rows].copy_(found[:num_rows])
