"""Prompts that a prefill server computes, with their KV on its way."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.disagg.frames import Failed, Prefill, Prefilled, Released
from runtime.disagg.outbox import Transfer
from specctl.contract.diagnostics import Diagnostic


@dataclass(kw_only=True, slots=True)
class PrefillJob:
    """A prompt that a decode server asked for.

    Args:
        transfers: of this rank, then of the stages before it.
        answer: what is told once nothing is read or written any more; None: it is being computed.
    """

    peer: str
    asked: Prefill
    transfers: tuple[Transfer, ...]
    answer: Prefilled | Failed | Released | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has an answer and nothing more is read or written for it."""
        return self.answer is not None and all(item.is_over for item in self.transfers)

    @property
    def problem(self) -> Diagnostic | None:
        """Why some of its KV did not arrive."""
        found = (item.problem for item in self.transfers)
        return next((problem for problem in found if problem is not None), None)

    def end(self, timeout_s: float) -> None:
        """Send nothing more."""
        for transfer in self.transfers:
            transfer.end(timeout_s)
