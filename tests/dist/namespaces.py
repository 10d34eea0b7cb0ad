"""Network namespaces joined by virtual cables that a test can pull out. Linux, root, iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19


@cache
def why_not() -> str | None:
    """Return why this machine makes no namespaces; None: it does."""
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    name, cable = f"try{os.getpid()}", f"t{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces: {made.stderr.strip()}"
    try:
        command = ["ip", "-n", name, "link", "add", f"{cable}a", "type", "veth"]
        veth = subprocess.run(
            [*command, "peer", "name", f"{cable}b"], check=False, capture_output=True, text=True
        )
        return f"no virtual cables: {veth.stderr.strip()}" if veth.returncode else None
    finally:
        _ip("netns", "delete", name)


def enter(namespace: str) -> None:
    """Put the calling thread, and what it starts, into a namespace."""
    with (Path("/run/netns") / namespace).open("rb") as handle:
        _call("setns", handle.fileno(), _CLONE_NEWNET)


def enter_with_devices(namespace: str) -> None:
    """Put this process into a namespace and let it see that one's devices in /sys."""
    enter(namespace)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_SLAVE | _MS_REC, None)
    _call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


def within(namespace: str | None, work: Callable[[], T]) -> T:
    """Run something in a namespace, in a thread of its own; None: here."""
    if namespace is None:
        return work()
    with ThreadPoolExecutor(1, initializer=enter, initargs=(namespace,)) as pool:
        return pool.submit(work).result()


class Star:
    """One namespace in the middle, a cable of its own from it to each of the others."""

    def __init__(self, prefix: str, num_others: int) -> None:
        """Name them; `star` makes them."""
        self.middle = f"{prefix}m"
        self.others = tuple(f"{prefix}{number}" for number in range(num_others))

    def address(self, number: int, *, of_middle: bool = False) -> str:
        """Return an end's address on a cable."""
        return f"10.213.{number}.{1 if of_middle else 2}"

    def make(self) -> None:
        """Make all namespaces and lay all cables."""
        for name in (self.middle, *self.others):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for number, name in enumerate(self.others):
            ends = (f"{name}a", f"{name}b")
            peer = ("peer", "name", ends[1], "netns", name)
            _ip("-n", self.middle, "link", "add", ends[0], "type", "veth", *peer)
            for space, end in zip((self.middle, name), ends, strict=True):
                address = self.address(number, of_middle=space == self.middle)
                _ip("-n", space, "address", "add", f"{address}/24", "dev", end)
                _ip("-n", space, "link", "set", end, "up")

    def cut(self, number: int) -> None:
        """Pull a cable out: what is sent is lost, and neither end is told."""
        _ip("-n", self.others[number], "link", "set", f"{self.others[number]}b", "down")

    def join(self, number: int) -> None:
        """Plug a cable in again."""
        _ip("-n", self.others[number], "link", "set", f"{self.others[number]}b", "up")

    def remove(self) -> None:
        """Remove everything; cables go with their namespaces."""
        for name in (self.middle, *self.others):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def star(num_others: int) -> Iterator[Star]:
    """Make a star and remove it in the end."""
    made = Star(f"sd{os.getpid()}", num_others)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*arguments: str) -> None:
    command: Sequence[str] = ["ip", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
