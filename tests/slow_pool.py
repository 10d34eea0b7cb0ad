"""Kernels made slow behind an engine's back.

What a layer's forward just wrote is taken away and put back some time after, keys before values, as
a GPU that runs behind its host would write it. The mark that goes with the layer waits for that.
What earlier forwards wrote stays: a sender that is late may read it still. Where marks are not
waited for, which is the defect, all that was to be sent is sent first, however late its thread is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import torch

from runtime.disagg.early import EarlySender
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer

DELAY_S = 0.01
LIMIT_S = 60.0


class SlowWriter:
    """Puts content back after a while; its mark waits for that, or does not."""

    def __init__(
        self, items: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], is_waited: bool
    ) -> None:
        """Take away: tensors, what they hold now, and where that is new."""
        self._items = items
        self._is_waited = is_waited
        self._may_begin = threading.Event()
        if is_waited:
            self._may_begin.set()
        for tensor, _, is_new in items:
            tensor.masked_fill_(is_new, float("nan"))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    @torch.inference_mode()  # a stage makes its pool in it, and mode is of a thread
    def _run(self) -> None:
        self._may_begin.wait(LIMIT_S)
        for tensor, content, is_new in self._items:
            time.sleep(DELAY_S)
            tensor[is_new] = content[is_new]

    @property
    def num_tensors(self) -> int:
        """How many a mark covers: keys and values of a layer are two."""
        return len(self._items)

    def away(self) -> list[torch.Tensor]:
        """Return what it may not have put back yet."""
        return [item for item, _, _ in self._items] if self.thread.is_alive() else []

    def synchronize(self) -> None:
        if self._is_waited:
            self.thread.join()

    wait = synchronize  # a CPU has no stream that could wait

    def end(self) -> None:
        """Let it begin, and wait for it."""
        self._may_begin.set()
        self.thread.join()


class NoLink:
    """Nothing goes over it: its end tells that the parts before it were written."""

    is_ordered = False

    def write(self, move: BlockMove) -> None:
        raise AssertionError(f"{move} goes nowhere")

    def finish(self, timeout_s: float) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Close nothing."""


class SlowPool:
    """Makes marks; each belongs to what changed in a pool since the last one.

    Attributes:
        sender: of the parts; set where marks are not waited for.
    """

    def __init__(self, *, is_waited: bool) -> None:
        self.layers: tuple[KVLayer, ...] = ()
        self.writers: list[SlowWriter] = []
        self.sender: EarlySender | None = None
        self._is_waited = is_waited
        self._known: dict[int, torch.Tensor] = {}

    def watch(self, layers: Sequence[KVLayer]) -> None:
        self.layers = tuple(layers)
        self._known = {id(item): item.clone() for item in self._tensors()}

    def mark(self, device: torch.device) -> SlowWriter:
        del device
        away = {id(item) for writer in self.writers for item in writer.away()}
        changed = [
            item
            for item in self._tensors()
            if id(item) not in away and not torch.equal(item, self._known[id(item)])
        ]
        items = [(item, item.clone(), item != self._known[id(item)]) for item in changed]
        self._known |= {id(tensor): content for tensor, content, _ in items}
        self.writers.append(SlowWriter(items, self._is_waited))
        return self.writers[-1]

    def settle(self) -> None:
        """Wait for the "device": the next forward reads what this one wrote."""
        if not self._is_waited:
            self._send_first()
        for writer in self.writers:
            writer.end()

    def _send_first(self) -> None:
        assert self.sender is not None, "what is not waited for is sent first"
        for sender in tuple(self.sender._of_peers.values()):
            assert sender.end(NoLink(), timeout_s=LIMIT_S).wait(LIMIT_S)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.k
            yield layer.v
