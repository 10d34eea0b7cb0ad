"""A channel between threads of one process: the readable twin of the runtime's."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import torch

from runtime.parallel.lost import lost_peer
from specctl.contract.diagnostics import DiagnosticError


class QueueChannel:
    """Messages in order; a receiver that waits too long is told as by the others."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        """Wait at most `timeout_s` for a message."""
        self._messages: queue.Queue[tuple[torch.Tensor, ...]] = queue.Queue()
        self._timeout_s = timeout_s

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand copies over: the sender may write its buffers again."""
        self._messages.put(tuple(tensor.detach().clone() for tensor in tensors))

    def flush(self) -> None:
        """Return at once: what was sent is in memory."""

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Return the oldest message; see `Channel.receive`."""
        try:
            return self._messages.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise DiagnosticError(lost_peer(f"no message in {self._timeout_s:g} s")) from error
