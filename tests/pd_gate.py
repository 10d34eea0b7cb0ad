"""A transport in memory whose writes wait at a gate."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from runtime.disagg.memory import MemoryLink, MemoryTransport
from runtime.disagg.transport import BlockMove
from runtime.kv import KVLayer
from tests.pd_harness import TIMEOUT_S


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.writes = 0


class GatedTransport(MemoryTransport):
    """Writes wait at a gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def connect(self, address: bytes, layers: Sequence[KVLayer]) -> Any:
        return GatedLink(super().connect(address, layers), self._gate)


class GatedLink:
    def __init__(self, link: MemoryLink, gate: Gate) -> None:
        self._link, self._gate = link, gate
        self.is_ordered = False

    def write(self, move: BlockMove) -> None:
        assert self._gate.is_open.wait(TIMEOUT_S)
        self._gate.writes += 1
        self._link.write(move)

    def finish(self, timeout_s: float) -> None:
        self._link.finish(timeout_s)

    def close(self) -> None:
        self._link.close()
