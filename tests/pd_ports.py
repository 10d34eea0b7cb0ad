"""Ports and boards of engines in threads, filled by hand."""

from __future__ import annotations

from runtime.disagg.frames import Frame
from runtime.disagg.listen import PeerEvent
from tests.pd_harness import through_the_wire


class Port:
    """One rank's port, filled by hand; every rank of a side gets the same."""

    has_news = False

    def __init__(self) -> None:
        self.incoming: list[PeerEvent | Frame] = []
        self.sent: list[Frame] = []

    def poll(self):  # type: ignore[no-untyped-def]
        found, self.incoming = tuple(self.incoming), []
        return found

    def wait(self, timeout_s: float) -> bool:
        return False

    def may_write(self, peer: str) -> bool:
        return True


class AskingPort(Port):
    def send(self, frame: Frame) -> None:
        self.sent.append(through_the_wire(frame))


class AnsweringPort(Port):
    def send(self, peer: str, frame: Frame) -> None:
        self.sent.append(through_the_wire(frame))


class Notes:
    """A board in memory."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def publish(self, key: str, value: str) -> None:
        self._values[key] = value

    def take(self, key: str) -> str | None:
        return self._values.pop(key, None)
