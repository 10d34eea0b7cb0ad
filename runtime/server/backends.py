"""Decode servers behind a router: which are ready, which has least to do, which is lost.

A server is *ready* while `/health` answers 200, it is no prefill server, and it serves what the
others serve that are ready: answers of two models are never mixed. One whose `/health` fails
`LOST_AFTER` times in turn is *lost*, and what still waits for it is told so. Everything here runs
on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

logger = logging.getLogger(__name__)

LOST_AFTER = 3


class Backend:
    """One decode server.

    `num_open` counts requests that this router has sent there and that have not ended.
    """

    def __init__(self, address: str) -> None:
        """Know a server by `host:port`; it is not ready before its first answer."""
        self.address = address
        self.is_ready = False
        self.problem = "not asked yet"
        self.peers: dict[str, str] = {}
        self.serves = ""
        self.num_open = 0
        self.num_failures = 0
        self._lost = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.address}"

    async def until_lost(self) -> None:
        """Wait until the server is lost."""
        await self._lost.wait()

    def answered(self, peers: dict[str, str], serves: str) -> None:
        """Take a good answer of `/health`."""
        self.serves = serves
        if not self.is_ready:
            logger.info("decode server %s is ready", self.address)
        self.is_ready, self.problem, self.peers, self.num_failures = True, "", peers, 0
        if self._lost.is_set():
            self._lost = asyncio.Event()

    def declined(self, peers: dict[str, str], problem: str) -> None:
        """Take an answer that says that it takes nothing now: it lives."""
        self._unready(peers, problem)
        self.num_failures = 0

    def failed(self, problem: str) -> None:
        """Take a missing answer; send nothing there before the next good one."""
        self._unready({}, problem)
        self.num_failures += 1
        if self.num_failures >= LOST_AFTER:
            self._lost.set()

    def described(self) -> dict[str, object]:
        """Return its part of the router's `/health`."""
        return {
            "address": self.address,
            "status": "ready" if self.is_ready else self.problem,
            "requests_open": self.num_open,
            "peers": self.peers,
        }

    def _unready(self, peers: dict[str, str], problem: str) -> None:
        if self.is_ready or self.problem != problem:
            logger.warning("decode server %s: %s", self.address, problem)
        self.is_ready, self.problem, self.peers = False, problem, peers


class Backends:
    """All decode servers, in the order in which they were named."""

    def __init__(self, addresses: Sequence[str], client: httpx.AsyncClient) -> None:
        """Watch servers; `watch` asks them."""
        self.all = tuple(Backend(address) for address in addresses)
        self._client = client
        self._turn = 0

    def choose(self, tried: Sequence[Backend]) -> Backend | None:
        """Return the ready server with the fewest open requests that was not tried; None: none.

        Among equals they take turns.
        """
        found = [item for item in self.all if item.is_ready and item not in tried]
        if not found:
            return None
        self._turn += 1
        fewest = min(item.num_open for item in found)
        idle = [item for item in found if item.num_open == fewest]
        return idle[self._turn % len(idle)]

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Ask every server for its health, again and again."""
        while True:
            await asyncio.gather(*(self._ask(item, timeout_s) for item in self.all))
            await asyncio.sleep(interval_s)

    async def _ask(self, backend: Backend, timeout_s: float) -> None:
        try:
            answer = await self._client.get(f"{backend.url}/health", timeout=timeout_s)
        except httpx.HTTPError as error:
            backend.failed(f"/health: {type(error).__name__}: {error}")
            return
        found = _document(answer.content)
        serves = str(found.get("serves", "unstated"))
        peers = {str(k): str(v) for k, v in dict(found.get("peers", {})).items()}
        if answer.status_code != 200:
            backend.declined(peers, f"/health: {answer.status_code} {found.get('status', '')}")
        elif found.get("role") == "prefill":
            backend.declined({}, "a prefill server: name it to decode servers with `--peer`")
        elif (other := self._of_another_model(backend, serves)) is not None:
            problem = f"serves another manifest or other weights than {other.address}"
            backend.declined(peers, problem)
        else:
            backend.answered(peers, serves)

    def _of_another_model(self, backend: Backend, serves: str) -> Backend | None:
        """Return a ready server that serves something else; None: there is none."""
        others = (item for item in self.all if item.is_ready and item is not backend)
        return next((item for item in others if item.serves != serves), None)


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
