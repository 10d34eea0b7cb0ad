"""Sends of a group that carries tensors of the CPU, until they have left."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from runtime.parallel.lost import lost_as_diagnostic


class Sends:
    """Sends to one peer, in order, with what they read.

    A send that is let go before the peer has asked for it never leaves.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, *, tag: int = 0) -> None:
        """Have none under way.

        Args:
            group: holds both ends; its time limit holds for every send.
            peer: world rank of the other end.
            tag: what the other end receives with.
        """
        self._group = group
        self._peer = peer
        self._tag = tag
        self._under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def start(self, tensor: torch.Tensor) -> None:
        """Send a tensor that nobody writes any more, without a wait.

        Raises:
            DiagnosticError: SD855, the peer is gone.
        """
        with lost_as_diagnostic():
            work = dist.isend(tensor, self._peer, group=self._group, tag=self._tag)
        assert work is not None, "a sender is in its group"
        self._under_way.append((work, tensor))

    def settle(self, num_left: int) -> None:
        """Forget what has left, and wait while more than `num_left` have not.

        Raises:
            DiagnosticError: SD855, the peer is gone or takes nothing within the time limit.
        """
        with lost_as_diagnostic():
            while self._under_way:
                work, _ = self._under_way[0]
                if len(self._under_way) <= num_left and not work.is_completed():
                    return
                work.wait()
                self._under_way.popleft()
