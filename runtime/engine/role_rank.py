"""One rank's part in a role over several ranks: an engine of the role that is told what came.

The first rank alone has connections. What comes over them is handed to all ranks before a step, so
their engines do the same; what they answer leaves from the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar, get_args

from runtime.disagg.frames import Failed, Frame, Prefilled, Released
from runtime.disagg.listen import PeerEvent
from runtime.disagg.ports import DecodePort, PrefillPort
from runtime.engine.decode_role import DecodeEngine
from runtime.engine.prefill_role import PrefillEngine
from runtime.engine.request import Admission, RequestDelta, RequestInput

RoleNews: TypeAlias = Frame | PeerEvent
N = TypeVar("N", bound=RoleNews)
N_co = TypeVar("N_co", bound=RoleNews, covariant=True)


class _Heard(Protocol[N_co]):
    """What a connection says, whichever role it is of."""

    @property
    def has_news(self) -> bool:
        """Whether something came since the last `poll`."""

    def poll(self) -> tuple[N_co, ...]:
        """Return what came."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for news; whether there are some."""


class ToldPort(Generic[N]):
    """One rank's port: what came is told to all, what is sent leaves from the first rank."""

    def __init__(self, real: _Heard[N] | None, kinds: type[N] | tuple[type[N], ...]) -> None:
        """Stand before `real`, whose news are of `kinds`; None: on another rank than the first."""
        self._heard = real
        self._kinds = kinds
        self._told: list[N] = []

    @property
    def has_news(self) -> bool:
        """Whether a connection of this rank said something."""
        return self._heard is not None and self._heard.has_news

    def fetch(self) -> tuple[N, ...]:
        """Return what came, for all ranks."""
        return () if self._heard is None else self._heard.poll()

    def hear(self, news: Sequence[RoleNews]) -> None:
        """Take in what came, from `fetch` of the first rank."""
        for item in news:
            assert isinstance(item, self._kinds), f"{type(item).__name__} came to the other role"
            self._told.append(item)

    def poll(self) -> tuple[N, ...]:
        """Return what was told since the last call."""
        told, self._told = tuple(self._told), []
        return told

    def wait(self, timeout_s: float) -> bool:
        """Wait for news on the first rank; the others wait for that one."""
        return self._heard is not None and self._heard.wait(timeout_s)


class ToldPrefillPort(ToldPort[Frame]):
    """A decode rank's port; see `ToldPort`."""

    def __init__(self, real: PrefillPort | None = None) -> None:
        """Stand before `real`; None: on another rank than the first."""
        super().__init__(real, get_args(Frame))
        self._real = real

    def send(self, frame: Frame) -> None:
        """Send on the first rank."""
        if self._real is not None:
            self._real.send(frame)


class ToldDecodePort(ToldPort[PeerEvent]):
    """A prefill rank's port; see `ToldPort`."""

    def __init__(self, real: DecodePort | None = None) -> None:
        """Stand before `real`; None: on another rank than the first."""
        super().__init__(real, get_args(PeerEvent))
        self._real = real

    def send(self, peer: str, frame: Prefilled | Failed | Released) -> None:
        """Send on the first rank."""
        if self._real is not None:
            self._real.send(peer, frame)


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
