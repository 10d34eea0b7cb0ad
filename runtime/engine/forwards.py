"""The target's forwards as an engine sees them: sent off now, waited for in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from runtime.batch import PreparedBatch
from runtime.kv import KVLayer
from runtime.models import TargetModel, TargetOutput
from runtime.parallel.messages import SlotNews

RowsDone: TypeAlias = Callable[[int, Sequence[SlotNews]], None]
"""Told of a target layer once its keys and values of a forward's rows were launched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsListener:
    """Hears of the rows of forwards, which are eager then.

    Args:
        on_sent_off: told of a forward's rows before any stage has them.
        on_layer: told of each layer of the stage that commits.
    """

    on_sent_off: Callable[[Sequence[SlotNews]], None]
    on_layer: RowsDone


_Inputs: TypeAlias = tuple[PreparedBatch, Sequence[KVLayer], tuple[int, ...]]
_Submitted: TypeAlias = tuple[_Inputs, Sequence[SlotNews]]


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

    def collect(self, on_rows: RowsDone | None = None) -> TargetOutput:
        """Wait for the oldest forward that was sent off.

        Args:
            on_rows: told of every layer of the stage that commits.

        Raises:
            DiagnosticError: SD853 to SD856, another stage is lost or failed.
        """

    def abandon(self) -> None:
        """Let every forward go that was sent off and not waited for."""

    def close(self) -> None:
        """Give up what other stages hold for this engine; it runs nothing afterwards."""


def layer_listener(
    on_rows: RowsDone | None, news: Sequence[SlotNews]
) -> Callable[[int], None] | None:
    """Return what a stage calls after each layer of a forward; None where nobody listens."""
    return None if on_rows is None else lambda layer: on_rows(layer, news)


class LocalForwards:
    """A target that is whole here: a forward runs when it is waited for."""

    depth = 1

    def __init__(self, target: TargetModel) -> None:
        """Run `target`."""
        self._target = target
        self._submitted: deque[_Submitted] = deque()

    def submit(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...],
        news: Sequence[SlotNews],
    ) -> None:
        """Keep a forward for `collect`; there is no other stage to tell."""
        self._submitted.append(((batch, kv, aux_layer_ids), news))

    def collect(self, on_rows: RowsDone | None = None) -> TargetOutput:
        """Run the oldest forward that was kept."""
        inputs, news = self._submitted.popleft()
        return self._target.forward(*inputs, on_layer=layer_listener(on_rows, news))

    def abandon(self) -> None:
        """Forget the forwards that were kept."""
        self._submitted.clear()

    def close(self) -> None:
        """Forget them; no other stage holds anything."""
        self.abandon()
