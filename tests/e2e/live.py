"""A live `specctl serve` process on loopback, and what the tests read from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

START_LIMIT_S = 240
LIMIT_S = 120
_LISTENING = re.compile(r"running on (http://127\.0\.0\.1:\d+)")


class LiveServer:
    """One process; `exit_code` is set once it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.url = self._wait_for_url()
        self.http = httpx.Client(base_url=self.url, timeout=LIMIT_S)
        self.openai = OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
        )

    def _wait_for_url(self) -> str:
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            found = _LISTENING.search(self.log.read_text())
            if found is not None:
                return found.group(1)
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"no server after {START_LIMIT_S} s:\n{self.log.read_text()}")

    def metrics(self) -> dict[str, float]:
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
        }

    def wait_until_idle(self) -> dict[str, float]:
        """Return the metrics once nothing runs, waits or holds KV."""
        limit = time.monotonic() + LIMIT_S
        names = ("requests_running", "queue_depth", "requests_open", "kv_usage_ratio")
        while True:
            metrics = self.metrics()
            if not any(metrics[f"specctl_{name}"] for name in names):
                return metrics
            assert time.monotonic() < limit, metrics
            time.sleep(0.05)

    def wait_until_open(self, count: int) -> None:
        """Wait until so many requests are in flight."""
        limit = time.monotonic() + LIMIT_S
        while self.metrics()["specctl_requests_open"] < count:
            assert time.monotonic() < limit, self.metrics()
            time.sleep(0.01)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def live_server(manifest: Path, log: Path, *options: str) -> Iterator[LiveServer]:
    """Start a server on a free port; it is killed if the test leaves it running."""
    command = [sys.executable, "-m", "specctl", "serve", str(manifest), "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--device", "cpu", *options],
            stdout=stream,
            stderr=stream,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
    try:
        server = LiveServer(process, log)
        with server.http, server.openai:
            yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
