"""Groups whose exchanges wait on the device, where the host cannot end a wait: only an abort can.

A kernel of the library that waits for a rank which is gone waits for ever, and with it every host
thread that waits for the stream. An abort lets such kernels end; what they leave in memory is
anything, so whoever reads results asks `check` first.
*Source:* `ProcessGroup.abort` of torch.distributed. Its watcher ends the process where it finds an
aborted exchange, unless `TORCH_NCCL_ASYNC_ERROR_HANDLING` is 0.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol

from runtime.parallel.lost import first_line
from specctl.contract.diagnostics import Diagnostic, DiagnosticError

logger = logging.getLogger(__name__)

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Abortable(Protocol):
    """What is aborted: a `torch.distributed.ProcessGroup` over NCCL."""

    def abort(self) -> None:
        """End every exchange of this process.

        Blocks while a captured graph holds the group.

        Raises:
            RuntimeError: the library found its connections in another state.
        """


def leave_aborts_to_us() -> None:
    """Keep the library from ending this process with an aborted exchange.

    To be called before the first group is made.
    """
    os.environ[_ERROR_HANDLING] = "0"


class GpuGroups:
    """The groups over NCCL that this process is in."""

    def __init__(self) -> None:
        """Have none."""
        self.problem: Diagnostic | None = None
        self.num_exchanges = 0
        """Launched by this process: what shows another thread of it that a step goes on."""
        self._groups: list[Abortable] = []
        self._aborts: list[threading.Thread] = []

    def add(self, group: Abortable) -> None:
        """Take a group in."""
        self._groups.append(group)

    @property
    def is_empty(self) -> bool:
        """Whether no exchange of this process waits on a device."""
        return not self._groups

    def begin(self) -> None:
        """Count an exchange that is launched next.

        Raises:
            DiagnosticError: what the groups were aborted for.
        """
        self.check()
        self.num_exchanges += 1

    def check(self) -> None:
        """Do nothing while the groups work.

        Raises:
            DiagnosticError: what they were aborted for.
        """
        if self.problem is not None:
            raise DiagnosticError(self.problem)

    def abort(self, problem: Diagnostic) -> None:
        """End what waits in any group; once. Returns at once.

        Args:
            problem: what `check` raises from now on.
        """
        if self.problem is not None:
            return
        self.problem = problem  # first: nothing new may be launched into what is being aborted
        for group in self._groups:
            thread = threading.Thread(target=_abort, args=(group,), name="nccl-abort", daemon=True)
            self._aborts.append(thread)
            thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether every abort that was begun has ended in time."""
        end = time.monotonic() + timeout_s
        for thread in self._aborts:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._aborts)


def _abort(group: Abortable) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        logger.warning("a group could not be aborted: %s", first_line(error))
