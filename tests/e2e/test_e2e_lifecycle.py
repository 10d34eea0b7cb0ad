"""Overload, SIGTERM and Ctrl-C during a stream, and the end of the grace time."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import LIMIT_S, LiveServer, live_server

pytestmark = pytest.mark.e2e


def stream_events(server: LiveServer, max_tokens: int, started: threading.Event) -> list[Any]:
    """Read a whole stream; the last item is `[DONE]` if it ended cleanly."""
    body = {
        "prompt": "a",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events: list[Any] = []
    with (
        httpx.Client(base_url=server.url, timeout=LIMIT_S) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            if line:
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
                started.set()
    return events


def stop_during_a_stream(
    server: LiveServer, max_tokens: int, stop: Callable[[LiveServer], None] = LiveServer.terminate
) -> list[Any]:
    started = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream_events, server, max_tokens, started)
        assert started.wait(LIMIT_S)
        stop(server)
        return reading.result(LIMIT_S)


def press_ctrl_c_twice(server: LiveServer) -> None:
    server.process.send_signal(signal.SIGINT)
    limit = time.monotonic() + LIMIT_S
    while "Waiting for connections to close" not in server.log.read_text():
        assert time.monotonic() < limit, server.log.read_text()
        time.sleep(0.05)
    server.process.send_signal(signal.SIGINT)


def overload(server: LiveServer) -> None:
    # Answers that take longer than thirty clients take to come, on a busy machine too.
    body = {"prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def post(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            return client.post("/v1/completions", json=body)

    with ThreadPoolExecutor(30) as pool:
        responses = list(pool.map(post, range(30)))
    statuses = Counter(response.status_code for response in responses)
    assert set(statuses) == {200, 429}, statuses
    assert statuses[200] >= 6
    refused = [response for response in responses if response.status_code == 429]
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert {response.json()["error"]["code"] for response in refused} == {"SD914"}
    answers = {r.json()["choices"][0]["text"] for r in responses if r.status_code == 200}
    assert len(answers) == 1
    server.wait_until_idle()


def test_overload_then_sigterm_lets_a_stream_finish(tiny_pair: Path, tmp_path: Path) -> None:
    options = ("--max-num-requests", "2", "--max-num-waiting", "4", "--grace-s", "30")
    with live_server(tiny_pair, tmp_path / "log", *options) as server:
        overload(server)
        events = stop_during_a_stream(server, max_tokens=100)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert sum(len(event["choices"][0]["text"]) for event in events[:-1]) > 0
        assert server.exit_code() == 0


def test_sigterm_ends_a_long_stream_after_the_grace_time(tiny_pair: Path, tmp_path: Path) -> None:
    with live_server(tiny_pair, tmp_path / "log", "--grace-s", "0.5") as server:
        events = stop_during_a_stream(server, max_tokens=2000)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "SD915"
        assert "choices" in events[0]
        assert server.exit_code() == 0


def test_a_second_ctrl_c_ends_a_long_stream_at_once(tiny_pair: Path, tmp_path: Path) -> None:
    with live_server(tiny_pair, tmp_path / "log", "--grace-s", "600") as server:
        events = stop_during_a_stream(server, max_tokens=2000, stop=press_ctrl_c_twice)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "SD915"
        assert server.exit_code() == 0
        assert "Traceback" not in server.log.read_text()
