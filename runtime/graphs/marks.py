"""Places in the queue of a device that the host can wait for."""

from __future__ import annotations

from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the queue; `torch.cuda.Event` is one."""

    def record(self) -> object:
        """Mark the end of all that was launched on the current stream."""

    def synchronize(self) -> object:
        """Wait until that is reached; returns at once where nothing was marked."""


class NoMark:
    """The mark of a device that is done when a launch returns."""

    def record(self) -> None:
        """Mark nothing."""

    def synchronize(self) -> None:
        """Return at once."""


def new_mark(device: torch.device) -> Mark:
    """Return a mark for the queue of a device."""
    if device.type != "cuda":
        return NoMark()
    event: Mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event
