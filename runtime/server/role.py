"""What the HTTP side needs of a server's role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prometheus_client.registry import Collector

from runtime.server.loop import EnginePort


class Role(Protocol):
    """What a server does for others, beside its engine."""

    @property
    def name(self) -> str:
        """`prefill` or `decode`."""

    @property
    def serves(self) -> str:
        """What servers that answer alike have in common: manifest and weights."""

    @property
    def engine(self) -> EnginePort:
        """Runs in the engine's thread."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to connect; `wake` makes an idle engine look for news."""

    def close(self) -> None:
        """End all connections, after the engine's thread has ended."""

    def states(self) -> dict[str, str]:
        """Return the state of each peer; `ready` is the good one."""

    def problem(self) -> str | None:
        """Return why requests would fail now."""

    def collector(self) -> Collector:
        """Return what makes the role's metrics."""
