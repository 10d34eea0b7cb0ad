"""When a transfer is over on every rank of a stage.

Ranks in step free blocks at the same step, or their tables would differ from then on; but each
writes through links of its own, which end when they end. So before anything is freed the ranks
agree: a transfer is over once it is over on all of them, and failed if it failed on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from runtime.disagg.failures import carrier_failed
from runtime.parallel.ranks import Ranks
from specctl.contract.diagnostics import Diagnostic


class Agreement(Protocol):
    """Makes one outcome of those of all ranks."""

    def settle(
        self, names: Sequence[str], over: Mapping[str, Diagnostic | None]
    ) -> Mapping[str, Diagnostic | None]:
        """Return the transfers that are over everywhere, with a problem where one has one.

        Args:
            names: all transfers, the same on every rank, in the same order.
            over: of them, those that are over on this rank.
        """


class Alone:
    """One rank: what is over is over."""

    def settle(
        self, names: Sequence[str], over: Mapping[str, Diagnostic | None]
    ) -> Mapping[str, Diagnostic | None]:
        """Return `over`."""
        del names
        return over


class RankAgreement:
    """The ranks of a stage, which all call `settle` at the same step."""

    def __init__(self, ranks: Ranks) -> None:
        """Agree over ranks that carry tensors of the CPU."""
        self._ranks = ranks

    def settle(
        self, names: Sequence[str], over: Mapping[str, Diagnostic | None]
    ) -> Mapping[str, Diagnostic | None]:
        """Return what is over on all ranks; see `Agreement.settle`."""
        if not names:
            return {}
        states = [0 if name not in over else 1 if over[name] is None else 2 for name in names]
        found = self._ranks.gather(torch.tensor(states))
        lowest, highest = found.amin(dim=0).tolist(), found.amax(dim=0).tolist()
        elsewhere = carrier_failed("ranks", "a transfer of another rank failed")
        return {
            name: (over[name] or elsewhere) if high == 2 else None
            for name, low, high in zip(names, lowest, highest, strict=True)
            if low
        }
