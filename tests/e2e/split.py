"""Prefill servers, decode servers and a router as processes on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

START_LIMIT_S = 240
LIMIT_S = 120
_URL = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
_LISTEN = re.compile(r"listening on (127\.0\.0\.1:\d+)")


class Process:
    """One `specctl` process that can be killed and started again at the same addresses."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.arguments = tuple(arguments)
        self.log = log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "specctl", *self.arguments],
                stdout=stream,
                stderr=stream,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[2],
            )

    def find(self, pattern: re.Pattern[str]) -> str:
        """Wait for a line of the log and return its group."""
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            found = pattern.findall(self.log.read_text())
            if found:
                return str(found[-1])
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"not after {START_LIMIT_S} s:\n{self.log.read_text()}")

    @property
    def url(self) -> str:
        """Where it answers HTTP."""
        return self.find(_URL)

    @property
    def address(self) -> str:
        """`host:port` of its HTTP side."""
        return self.url.removeprefix("http://")

    @property
    def listen(self) -> str:
        """Where a prefill server meets decode servers."""
        return self.find(_LISTEN)

    def health(self) -> tuple[int, dict[str, object]]:
        """Return status and document of /health; (0, {}) where nobody answers."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=LIMIT_S, trust_env=False)
        except httpx.HTTPError:
            return 0, {}
        return answer.status_code, answer.json()

    def wait_healthy(self) -> None:
        """Wait for a good answer of /health."""
        limit = time.monotonic() + START_LIMIT_S
        while self.health()[0] != 200:
            assert time.monotonic() < limit, self.log.read_text()
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=LIMIT_S, trust_env=False).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def wait_idle(self) -> dict[str, float]:
        """Return the metrics once no request, no block and no room is held."""
        limit = time.monotonic() + LIMIT_S
        while True:
            found = self.metrics()
            held = [
                found.get(f"specctl_{name}", 0)
                for name in (
                    *("requests_running", "queue_depth", "requests_open", "kv_usage_ratio"),
                    *("kv_quarantined_blocks", "handover_open", "handover_fenced"),
                )
            ]
            if not any(held):
                return found
            assert time.monotonic() < limit, found
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def restart(self) -> None:
        """Start again with the same arguments, after `kill`."""
        self.process = self._start()

    def stop(self) -> None:
        """End it, gently first."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[Process]:
    """Start a process and end it afterwards."""
    process = Process(arguments, log)
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def split_servers(
    manifest: Path,
    directory: Path,
    *options: str,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
) -> Iterator[tuple[list[Process], list[Process]]]:
    """Start prefill and decode servers, each decode server knowing all prefill servers."""
    serve = ("serve", str(manifest), "--device", "cpu", "--port", "0")
    listen = ("--role", "prefill", "--listen", "127.0.0.1:0")
    with ExitStack() as stack:
        prefill = [
            stack.enter_context(
                running(
                    (*serve, *listen, *options, *prefill_options),
                    directory / f"prefill{index}.log",
                )
            )
            for index in range(num_prefill)
        ]
        peers = ",".join(process.listen for process in prefill)
        decode = [
            stack.enter_context(
                running(
                    (*serve, "--role", "decode", "--peer", peers, *options, *decode_options),
                    directory / f"decode{index}.log",
                )
            )
            for index in range(num_decode)
        ]
        for process in decode:
            process.wait_healthy()
        yield prefill, decode
