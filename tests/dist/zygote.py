"""Forks `specctl` commands from a process that has imported everything: a server in a second.

Reads one JSON list a line: [log file, kill file, network namespace or "", arguments...]; answers
with the child's pid. A child whose kill file names a moment ends itself with SIGKILL at it, once.
After `hold` and a moment it stops there as long as the file exists, and says so by a file beside it
(`.held`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import runtime.server.route
import runtime.server.start  # noqa: F401
from runtime.disagg.frames import Prefill, Prefilled
from runtime.disagg.listen import DecodePeers
from runtime.disagg.outbox import Passage
from runtime.disagg.peers import PrefillPeers
from runtime.engine.engine import Engine
from runtime.engine.prefill_role import PrefillEngine
from specctl.cli.app import main
from tests.dist.namespaces import enter_with_devices

MOMENTS = {"prefill": ("before", "during", "after"), "decode": ("before", "during", "after")}
HOLD_POLL_S = 0.01
WRITE_S = 0.004  # each write takes a little, so that a moment during it exists


def serve() -> None:
    """Fork a child for each line of standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    torch.set_num_threads(1)
    for line in sys.stdin:
        log, kill_file, namespace, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if namespace:
                enter_with_devices(namespace)
            become(Path(log), Path(kill_file), arguments)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def become(log: Path, kill_file: Path, arguments: list[str]) -> None:
    """Run one command in this process and end it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, null), (1, target), (2, target)):
        os.dup2(source, number)
    watch_moments(kill_file)
    sys.argv = ["specctl", *arguments]
    try:
        main()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    os._exit(0)


def stop_at(kill_file: Path, moment: str) -> None:
    """End or hold this process where the file names the moment."""
    try:
        wish = kill_file.read_text()
        if wish == moment:
            kill_file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    except FileNotFoundError:
        return
    if wish == f"hold {moment}":
        kill_file.with_suffix(".held").touch()
        while kill_file.exists():
            time.sleep(HOLD_POLL_S)


def watch_moments(kill_file: Path) -> None:
    """End or hold this process at the moment that the file names."""

    def at(moment: str) -> None:
        stop_at(kill_file, moment)

    def before(owner: type, name: str, moment: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def wrapped(self: Any, *arguments: Any) -> Any:
            at(moment(*arguments))
            return original(self, *arguments)

        setattr(owner, name, wrapped)

    def write(self: Passage, move: Any) -> None:
        original_write(self, move)
        time.sleep(WRITE_S)
        if move.source_layer > 0:
            at("prefill during")

    original_write = Passage.write
    Passage.write = write  # type: ignore[method-assign]
    before(PrefillEngine, "_begin", lambda *_: "prefill before")
    before(
        DecodePeers,
        "send",
        lambda peer, frame: "prefill after" if isinstance(frame, Prefilled) else "",
    )
    before(
        PrefillPeers, "send", lambda frame: "decode before" if isinstance(frame, Prefill) else ""
    )
    before(Engine, "step", lambda *_: "decode after")  # of a decode server: rounds, no prompts
    original_poll = PrefillPeers.poll
    open_since: dict[str, float] = {}

    def poll(self: PrefillPeers) -> Any:
        now = time.monotonic()
        if not self.num_rooms:
            open_since.clear()
        elif now - open_since.setdefault("room", now) > 2 * WRITE_S:
            at("decode during")
        return original_poll(self)

    PrefillPeers.poll = poll  # type: ignore[method-assign]


if __name__ == "__main__":
    serve()
