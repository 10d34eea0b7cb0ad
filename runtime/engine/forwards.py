"""The target's forwards as an engine sees them: sent off now, waited for in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from runtime.batch import PreparedBatch
from runtime.kv import KVLayer
from runtime.models import TargetModel, TargetOutput
from runtime.parallel.messages import SlotNews


class Forwards(Protocol):
    """Forwards of one target; several may be under way when it is spread over stages."""

    @property
    def depth(self) -> int:
        """How many forwards keep every stage at work."""

    def submit(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...],
        news: Sequence[SlotNews],
    ) -> None:
        """Send a forward off.

        Args:
            batch: its rows.
            kv: cache layers of the stage that commits.
            aux_layer_ids: states to capture.
            news: for each request of the batch, what became of its rows before.
        """

    def collect(self) -> TargetOutput:
        """Wait for the oldest forward that was sent off."""


class LocalForwards:
    """A target that is whole here: a forward runs when it is waited for."""

    depth = 1

    def __init__(self, target: TargetModel) -> None:
        """Run `target`."""
        self._target = target
        self._submitted: deque[tuple[PreparedBatch, Sequence[KVLayer], tuple[int, ...]]] = deque()

    def submit(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...],
        news: Sequence[SlotNews],
    ) -> None:
        """Keep a forward for `collect`; there is no other stage to tell."""
        del news
        self._submitted.append((batch, kv, aux_layer_ids))

    def collect(self) -> TargetOutput:
        """Run the oldest forward that was kept."""
        return self._target.forward(*self._submitted.popleft())
