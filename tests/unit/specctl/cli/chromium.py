"""A headless Chromium for tests, spoken to through its DevTools pipe; standard library only.

The page's own policy forbids scripts; what the tests evaluate goes through DevTools and is not
subject to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Return the command of an installed browser, None when there is none."""
    named = os.environ.get("CHROMIUM")
    return next((path for name in (named, *NAMES) if name and (path := shutil.which(name))), None)


class Page:
    """One tab: calls, and the events that came in between."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._next_id = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Open the tab and switch on what the tests listen to."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next_id:
                assert "error" not in answer, (method, answer)
                result = answer["result"]
                assert isinstance(result, dict)
                return result
            self.events.append(answer)

    def open(self, path: Path) -> None:
        """Show a file and wait until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def of(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of every event of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser did not answer in time"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser closed its pipe"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        value = json.loads(text)
        assert isinstance(value, dict)
        return value


@contextlib.contextmanager
def browser(command: str, profile: Path) -> Iterator[Page]:
    """Run the browser and yield its tab."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    arguments = (
        "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
        "--hide-scrollbars --remote-debugging-pipe"
    )
    # The browser reads commands from descriptor 3 and answers on 4.
    script = f'exec "$0" {arguments} --user-data-dir="$1" 3<&{in_read} 4>&{out_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, command, str(profile)],
        pass_fds=(in_read, out_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        page = Page(in_write, out_read)
        page.attach()
        yield page
    finally:
        os.close(in_write)  # the browser ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        os.close(out_read)
