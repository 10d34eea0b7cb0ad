"""Ports for servers that tests start, end, and start again at the same address.

The system takes the near end of every connection from a range of its own. A port of that range that
was free a moment ago may be such an end when a server wants it, or be joined to itself by a client
that dials it while nobody listens. What is given out here lies outside that range and is held
by a lock until this process ends, so that runs beside each other get different ones.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

_PORTS = range(20_000, 32_000)
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_locks: list[IO[bytes]] = []


def free_port() -> int:
    """Return a port of the loopback that nobody else is given while this process lives."""
    folder = Path(tempfile.gettempdir()) / f"specctl-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in _usable():
        lock = (folder / str(port)).open("wb")
        if _is_ours(lock) and _is_free(port):
            _locks.append(lock)
            return port
        lock.close()
    raise AssertionError("every port is taken")


def _usable() -> list[int]:
    """Return the ports that no connection gets by itself; all of them where those are none."""
    first, last = map(int, _RANGE_FILE.read_text("ascii").split())
    return [port for port in _PORTS if not first <= port <= last] or list(_PORTS)


def _is_ours(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
