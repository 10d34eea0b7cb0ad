"""When a transfer is over on every rank of a stage.

Ranks in step free blocks at the same step, or their tables would differ from then on; but each
writes through links of its own, which end when they end. So before anything is freed the ranks
agree: a transfer is over once it is over on all of them, and failed if it failed on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.disagg.failures import carrier_failed
from runtime.parallel.ranks import Ranks
from specctl.contract.diagnostics import Diagnostic


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
        lowest, highest = found[..., 0].amin(dim=0).tolist(), found[..., 0].amax(dim=0).tolist()
        num_bytes = found[..., 1].sum(dim=0).tolist()
        elsewhere = carrier_failed("ranks", "a transfer of another rank failed")
        return {
            name: Ended(
                problem=(over[name].problem or elsewhere) if high == 2 else None,
                num_kv_bytes=count,
            )
            for name, low, high, count in zip(names, lowest, highest, num_bytes, strict=True)
            if low
        }


def _numbers(ended: Ended | None) -> tuple[int, int]:
    """Return 0 (not over), 1 (arrived) or 2 (failed), and bytes."""
    if ended is None:
        return 0, 0
    return (1 if ended.problem is None else 2), ended.num_kv_bytes
