"""One rank's part in a role over several ranks: an engine of the role that is told what came.

The first rank alone has connections. What comes over them is handed to all ranks before a step, so
their engines do the same; what they answer leaves from the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from runtime.disagg.frames import Failed, Frame, Prefilled, Released
from runtime.disagg.listen import Arrived, Left, Said
from runtime.disagg.ports import DecodePort, PrefillPort
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.request import Admission, RequestDelta, RequestInput

RoleNews: TypeAlias = Frame | Arrived | Said | Left


class ToldPrefillPort:
    """A decode rank's port: what came is told, what is sent leaves from the first rank."""

    def __init__(self, real: PrefillPort | None = None) -> None:
        """Stand before `real`; None: on another rank than the first."""
        self._real = real
        self._told: list[Frame] = []

    @property
    def has_news(self) -> bool:
        """Whether a connection of this rank said something."""
        return self._real is not None and self._real.has_news

    def fetch(self) -> tuple[Frame, ...]:
        """Return what came, for all ranks."""
        return () if self._real is None else self._real.poll()

    def hear(self, news: Sequence[RoleNews]) -> None:
        """Take in what came, from `fetch` of the first rank."""
        for item in news:
            assert not isinstance(item, Arrived | Said | Left), "frames come to a decode server"
            self._told.append(item)

    def poll(self) -> tuple[Frame, ...]:
        """Return what was told since the last call."""
        told, self._told = tuple(self._told), []
        return told

    def send(self, frame: Frame) -> None:
        """Send on the first rank."""
        if self._real is not None:
            self._real.send(frame)

    def wait(self, timeout_s: float) -> bool:
        """Wait for news on the first rank; the others wait for that one."""
        return self._real is not None and self._real.wait(timeout_s)


class ToldDecodePort:
    """A prefill rank's port; see `ToldPrefillPort`."""

    def __init__(self, real: DecodePort | None = None) -> None:
        """Stand before `real`; None: on another rank than the first."""
        self._real = real
        self._told: list[Arrived | Said | Left] = []

    @property
    def has_news(self) -> bool:
        """Whether a connection of this rank said something."""
        return self._real is not None and self._real.has_news

    def fetch(self) -> tuple[Arrived | Said | Left, ...]:
        """Return what came, for all ranks."""
        return () if self._real is None else self._real.poll()

    def hear(self, news: Sequence[RoleNews]) -> None:
        """Take in what came, from `fetch` of the first rank."""
        for item in news:
            assert isinstance(item, Arrived | Said | Left), "events come to a prefill server"
            self._told.append(item)

    def poll(self) -> tuple[Arrived | Said | Left, ...]:
        """Return what was told since the last call."""
        told, self._told = tuple(self._told), []
        return told

    def send(self, peer: str, frame: Prefilled | Failed | Released) -> None:
        """Send on the first rank."""
        if self._real is not None:
            self._real.send(peer, frame)

    def wait(self, timeout_s: float) -> bool:
        """Wait for news on the first rank; the others wait for that one."""
        return self._real is not None and self._real.wait(timeout_s)


class RoleRank:
    """An engine of a role and its port, as lockstep drives them."""

    def __init__(
        self,
        engine: DecodeEngine | PrefillEngine,
        port: ToldPrefillPort | ToldDecodePort,
        *,
        close: Callable[[], None],
    ) -> None:
        """Drive `engine`, which reads `port`; `close` ends what this rank has open beside them."""
        self.role_engine = engine
        self.port = port
        self.close = close

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; asked on the first rank."""
        return self.role_engine.has_work

    @property
    def num_free_places(self) -> int:
        """How many more requests `add_request` takes now."""
        return self.role_engine.num_free_places

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request; see the engine."""
        return self.role_engine.add_request(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request; see the engine."""
        return self.role_engine.abort(request_id)

    def flush_cache(self) -> None:
        """Clear logical state; see the engine."""
        self.role_engine.flush_cache()

    def step(self) -> tuple[RequestDelta, ...]:
        """Take in what was told and run one round."""
        return self.role_engine.step()
