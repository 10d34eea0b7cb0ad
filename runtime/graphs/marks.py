"""Places in the queue of a device that the host, or what is launched later, can wait for."""

from __future__ import annotations

from typing import Protocol

import torch


class Ready(Protocol):
    """A place in the queue that was marked; `torch.cuda.Event` is one."""

    def synchronize(self) -> object:
        """Wait until that is reached; returns at once where nothing was marked."""

    def wait(self) -> object:
        """Let what the current stream gets from now on come after it."""


class Mark(Ready, Protocol):
    """A place that may be marked again."""

    def record(self) -> object:
        """Mark the end of all that was launched on the current stream."""


class NoMark:
    """The mark of a device that is done when a launch returns."""

    def record(self) -> None:
        """Mark nothing."""

    def synchronize(self) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Hold nothing back."""


def new_mark(device: torch.device) -> Mark:
    """Return a mark for the queue of a device."""
    if device.type != "cuda":
        return NoMark()
    event: Mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


def mark(device: torch.device) -> Ready:
    """Return what marks the end of everything launched on a device's current stream so far."""
    made = new_mark(device)
    made.record()
    return made
