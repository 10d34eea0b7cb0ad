"""Where captured rounds leave their outcomes for the host, which reads them a round late.

Legend: B requests, X columns of the output, G drafts.
"""

from __future__ import annotations

import torch

from runtime.graphs.marks import new_mark
from runtime.kernels.outcomes import OutcomeTensors, outcome_store


class OutcomeBuffers:
    """Buffers in pinned memory, or plain ones of a CPU; each holds the outcome of one round.

    Attributes:
        host: the tensors of each buffer; the host reads them when their round is done.
    """

    def __init__(self, source: OutcomeTensors, *, num_buffers: int) -> None:
        """Allocate everything and compile what fills it.

        Args:
            source: what rounds write on the device.
            num_buffers: outcomes that may be unread.
        """
        device = source.output_BX.device
        self.host = tuple(_on_host(source) for _ in range(num_buffers))
        self._stores = tuple(outcome_store(source, host) for host in self.host)
        self._marks = tuple(new_mark(device) for _ in range(num_buffers))
        self._widths = [0] * num_buffers

    def store(self, buffer: int, num_rows: int, width: int) -> None:
        """Copy the outcome of the round that was launched last.

        Args:
            buffer: what was in it is lost.
            num_rows: requests of the round.
            width: columns of its output.

        Sync: none.
        """
        self._stores[buffer](num_rows)
        self._marks[buffer].record()
        self._widths[buffer] = width

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        """Wait for a buffer's round and return the output of its first requests."""
        self._marks[buffer].synchronize()
        output_BX = self.host[buffer].output_BX
        rows: list[list[int]] = output_BX[:num_requests, : self._widths[buffer]].tolist()
        return rows

    def counted(self, buffer: int, num_requests: int) -> list[int] | None:
        """Return the drafts that counted in a buffer that was read; None: all."""
        counted_B = self.host[buffer].num_counted_B
        if counted_B is None:
            return None
        counts: list[int] = counted_B[:num_requests].tolist()
        return counts

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        """Return the draft's chances in a buffer that was read; empty lists: it has none."""
        confidence_BG = self.host[buffer].confidence_BG
        if confidence_BG is None:
            return [[]] * num_requests
        rows: list[list[float]] = confidence_BG[:num_requests].tolist()
        return rows


def _on_host(source: OutcomeTensors) -> OutcomeTensors:
    """Return zeros of the same shapes that the host and the device see."""
    is_pinned = source.output_BX.is_cuda

    def zeros(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=is_pinned)

    return OutcomeTensors(
        output_BX=zeros(source.output_BX),
        num_counted_B=None if source.num_counted_B is None else zeros(source.num_counted_B),
        confidence_BG=None if source.confidence_BG is None else zeros(source.confidence_BG),
    )
