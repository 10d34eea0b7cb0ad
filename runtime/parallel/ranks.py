"""Sums and choices over tensor-parallel ranks, in an order that no library decides.

A library's all-reduce adds in an order that follows message size and topology. Here every rank
gathers all float32 partials and adds them in rank order, so each has the same bits, and they depend
on the number of ranks alone. What a rank computes from equal bits is equal: no result needs to be
sent around afterwards.

Legend: M rows, N columns of one rank, R ranks.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
import torch.distributed as dist

from runtime.parallel.gpu_groups import GpuGroups
from runtime.parallel.lost import first_line
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

# The newer name of the same call; what came before warns.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(Protocol):
    """The ranks of one stage, as one of them sees them."""

    @property
    def rank(self) -> int:
        """This rank, below `size`."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [R, *x.shape]: every rank's tensor in rank order; shapes and dtypes are equal.

        Blocks until all ranks have called it.
        """


class OneRank:
    """A stage that is not split: nothing is exchanged."""

    rank = 0
    size = 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [1, *x.shape]."""
        return x[None]


ONE_RANK = OneRank()


class DistributedRanks:
    """Ranks that are processes of one torch.distributed group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        wire: torch.device | None = None,
        gpu_groups: GpuGroups | None = None,
    ) -> None:
        """Stand for this process in `group`, whose ranks are in the order of sums.

        Args:
            group: of the ranks.
            wire: where the group takes tensors from; None: where they are. Ranks that share a GPU
                exchange over the CPU: copies move no bit.
            gpu_groups: what `group` is aborted with; None: it waits in the host.
        """
        self._group = group
        self._gpu_groups = gpu_groups
        self._wire = wire
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [R, *x.shape]; see `Ranks.gather`. Graph-safe: with NCCL.

        Raises:
            DiagnosticError: SD855, a rank is gone or silent beyond the group's time limit.
        """
        if self._gpu_groups is not None:
            self._gpu_groups.begin()
        sent = x.contiguous() if self._wire is None else x.contiguous().to(self._wire)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=sent.device)
        flat = out.flatten(0, 1) if x.dim() else out
        try:
            _gather_into(flat, sent, group=self._group)
        except RuntimeError as error:
            raise DiagnosticError(lost_rank(first_line(error))) from error
        return out.to(x.device)


def lost_rank(found: str) -> Diagnostic:
    """Return SD855 for a rank of the same stage that does not answer."""
    return diagnose(
        "SD855",
        where="tensor parallel",
        message="another rank of the stage is gone or silent",
        expected="its part within the time limit",
        found=found,
    )


class ThreadRanks:
    """Ranks that are threads of one process: the same sums in the same order without a network.

    The readable twin of `DistributedRanks`, and what tests compare it with.
    """

    def __init__(self, rank: int, shared: ThreadExchange) -> None:
        """Stand for rank `rank` of an exchange."""
        self.rank = rank
        self.size = shared.size
        self._shared = shared

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [R, *x.shape]; see `Ranks.gather`."""
        return self._shared.gather(self.rank, x)


class ThreadExchange:
    """Where threads meet to exchange a tensor each."""

    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        """Wait for `size` threads, each at most `timeout_s` (then `BrokenBarrierError`)."""
        self.size = size
        self._slots: list[torch.Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def ranks(self) -> tuple[ThreadRanks, ...]:
        """Return one view for each thread."""
        return tuple(ThreadRanks(rank, self) for rank in range(self.size))

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Return all tensors once every thread has brought its own."""
        self._slots[rank] = x
        self._barrier.wait()
        gathered = torch.stack([slot for slot in self._slots if slot is not None])
        self._barrier.wait()  # nobody brings the next one before all have read
        return gathered

    def abort(self) -> None:
        """Wake every waiting thread with `BrokenBarrierError`: one of them failed."""
        self._barrier.abort()


def rank_sum(ranks: Ranks, partial_MN: torch.Tensor) -> torch.Tensor:
    """Return float32 [M, N]: the partials of all ranks added in rank order.

    Args:
        ranks: of the stage.
        partial_MN: float32, this rank's.

    Exactness: the bits of a row depend on its own partials and the number of ranks.
    """
    if ranks.size == 1:
        return partial_MN
    total, *others = ranks.gather(partial_MN).unbind(0)
    for other in others:
        total = total + other
    return total


def gather_columns(ranks: Ranks, x_MN: torch.Tensor) -> torch.Tensor:
    """Return [M, R * N]: the columns of all ranks side by side in rank order."""
    if ranks.size == 1:
        return x_MN
    return ranks.gather(x_MN).transpose(0, 1).flatten(1)


def choose_highest(ranks: Ranks, values_M: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
    """Return int64 [M]: the id with the highest value over all ranks, the lowest one on a tie.

    Args:
        ranks: of the stage.
        values_M: float32, the highest value on this rank.
        ids_M: int64, the lowest id on this rank that has it, in an id space that all ranks share.
    """
    if ranks.size == 1:
        return ids_M
    values_RM, ids_RM = ranks.gather(values_M), ranks.gather(ids_M)
    best_M = values_RM.amax(dim=0)
    beyond = torch.iinfo(torch.int64).max
    return torch.where(values_RM == best_M, ids_RM, beyond).amin(dim=0)
