"""When a transfer is over on every rank of a stage.

Ranks in step free blocks at the same step, or their tables would differ from then on; but each
writes through links of its own, which end when they end. So before anything is freed the ranks
agree: a transfer is over once it is over on all of them, and failed if it failed on one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.disagg.failures import not_written
from runtime.parallel.ranks import Ranks
from specctl.contract.diagnostics import Diagnostic

logger = logging.getLogger(__name__)

_NOT_OVER, _ARRIVED, _FAILED = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A transfer that is over.

    Args:
        problem: why some of it did not arrive.
        num_kv_bytes: what the carrier took of it.
    """

    problem: Diagnostic | None = None
    num_kv_bytes: int = 0


class Agreement(Protocol):
    """Makes one outcome of those of all ranks."""

    def settle(self, names: Sequence[str], over: Mapping[str, Ended]) -> Mapping[str, Ended]:
        """Return the transfers that are over everywhere, with a problem where one has one.

        Args:
            names: all transfers, the same on every rank, in the same order.
            over: of them, those that are over on this rank.

        Returns:
            Bytes are those of all ranks together.
        """


class Alone:
    """One rank: what is over is over."""

    def settle(self, names: Sequence[str], over: Mapping[str, Ended]) -> Mapping[str, Ended]:
        """Return `over`."""
        del names
        return over


class RankAgreement:
    """The ranks of a stage, which all call `settle` at the same step."""

    def __init__(self, ranks: Ranks) -> None:
        """Agree over ranks that carry tensors of the CPU."""
        self._ranks = ranks

    def settle(self, names: Sequence[str], over: Mapping[str, Ended]) -> Mapping[str, Ended]:
        """Return what is over on all ranks; see `Agreement.settle`.

        Raises:
            DiagnosticError: SD855, a rank is gone.
        """
        if not names:
            return {}
        found = self._ranks.gather(torch.tensor([_numbers(over.get(name)) for name in names]))
        outcomes = found[..., 0].T.tolist()
        num_bytes = found[..., 1].sum(dim=0).tolist()
        return {
            name: Ended(problem=self._problem(name, over[name], ranks), num_kv_bytes=count)
            for name, ranks, count in zip(names, outcomes, num_bytes, strict=True)
            if min(ranks) > _NOT_OVER
        }

    def _problem(self, name: str, own: Ended, outcomes: Sequence[int]) -> Diagnostic | None:
        """Return why a transfer failed, of this rank's own finding where it has one."""
        if own.problem is not None:
            if self._ranks.rank > 0:  # the first rank alone answers the other side
                logger.warning("%s: %s", name, own.problem.oneline())
            return own.problem
        if _FAILED not in outcomes:
            return None
        rank = outcomes.index(_FAILED)
        return not_written(f"rank {rank} of the stage", "it failed; its log says why")


def _numbers(ended: Ended | None) -> tuple[int, int]:
    """Return the outcome of a transfer, and bytes."""
    if ended is None:
        return _NOT_OVER, 0
    return (_ARRIVED if ended.problem is None else _FAILED), ended.num_kv_bytes
