"""A role's engine that ends with the first of its ranks.

What other processes hold of a request cannot be had back when one of them is gone, so nothing runs
any more: the peers are told by the end of their connections, which frees what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from runtime.engine.request import Admission, RequestDelta, RequestInput
from runtime.engine.stats import EngineStats
from specctl.contract.diagnostics import Diagnostic, DiagnosticError

RANK_FAULTS = frozenset({"SD853", "SD854", "SD855", "SD856", "SD859"})
"""A stage or a rank is lost, failed, or does something else than the others."""


def is_rank_fault(error: Exception) -> bool:
    """Whether an error ends a server of several ranks."""
    return isinstance(error, DiagnosticError) and error.diagnostics[0].code in RANK_FAULTS


class RoleEngine(Protocol):
    """What `UntilLost` stands before."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request."""

    def abort(self, request_id: str) -> bool:
        """Drop a request."""

    def step(self) -> tuple[RequestDelta, ...]:
        """Run one round."""

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""

    def flush_cache(self) -> None:
        """Clear logical state."""


class UntilLost:
    """An `EnginePort` over several processes."""

    def __init__(self, engine: RoleEngine, *, on_lost: Callable[[], None]) -> None:
        """Run `engine`; `on_lost` ends the connections, once, in the engine's thread."""
        self._engine = engine
        self._on_lost = on_lost
        self._problem: Diagnostic | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; never after a rank was lost."""
        return self._problem is None and self._engine.has_work

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request.

        Raises:
            DiagnosticError: what ended the server; what the engine raises.
        """
        if self._problem is not None:
            raise DiagnosticError(self._problem)
        return self._engine.add_request(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request; see the engine."""
        return self._engine.abort(request_id)

    def step(self) -> tuple[RequestDelta, ...]:
        """Run one round.

        Raises:
            DiagnosticError: SD853 to SD856 and SD859: the last step of this engine.
        """
        try:
            return self._engine.step()
        except DiagnosticError as error:
            if is_rank_fault(error):
                self._problem = error.diagnostics[0]
                self._on_lost()
            raise

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._engine.stats()

    def flush_cache(self) -> None:
        """Clear logical state on every rank, while there is one."""
        if self._problem is None:
            self._engine.flush_cache()
