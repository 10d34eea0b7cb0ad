"""What the engines of the two roles need of their connections."""

from __future__ import annotations

from typing import Protocol

from runtime.disagg.frames import Failed, Frame, Prefilled, Released
from runtime.disagg.listen import PeerEvent


class PrefillPort(Protocol):
    """The decode side's way to prefill servers; `runtime.disagg.peers` has it over sockets."""

    @property
    def has_news(self) -> bool:
        """Whether something came since the last `poll`."""

    def send(self, frame: Frame) -> None:
        """Take a `Prefill` or an `Abort`; never waits for a peer."""

    def poll(self) -> tuple[Frame, ...]:
        """Return what came: for each request asked for, in the end, one of three frames.

        `Prefilled`, `Failed` (nothing more is written for it) or, after an `Abort`, `Released`.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; whether there are some."""


class DecodePort(Protocol):
    """The prefill side's way to decode servers; `runtime.disagg.listen` has it over sockets."""

    @property
    def has_news(self) -> bool:
        """Whether something happened since the last `poll`."""

    def send(self, peer: str, frame: Prefilled | Failed | Released) -> None:
        """Queue a frame for a decode server; never waits. To one that left it goes nowhere."""

    def poll(self) -> tuple[PeerEvent, ...]:
        """Return what happened, in order for each decode server."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; whether there are some."""
