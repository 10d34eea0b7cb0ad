"""Two prefill servers, two decode servers and a router that are killed and come back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from tests.dist.namespaces import within
from tests.ports import free_port
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import tiny_manifest, write_manifest

START_LIMIT_S = LIMIT_S = 240
"""For what comes sooner or later, on a busy machine too: it ends a hang."""
RETRY_S = 0.5
CODES = {"SD860", "SD861", "SD863", "SD864", "SD866", "SD914", "SD915"}
"""How a request may end under kills, when it does not end well."""

HELD = (
    *("requests_running", "queue_depth", "requests_open", "kv_usage_ratio"),
    *("kv_quarantined_blocks", "handover_open", "handover_fenced"),
)


CONTEXT = 512


def write_pair(directory: Path) -> Path:
    """Write a tiny target and its draft, and return their manifest."""
    target = write_tiny_target(
        directory / "tiny-target", num_layers=2, max_position_embeddings=CONTEXT
    )
    draft = write_tiny_eagle3(
        directory / "draft", target, boundary_ids=(0, 1, 2), max_position_embeddings=CONTEXT
    )
    return write_manifest(directory, tiny_manifest(target, draft))


def prompts_and_answers(manifest: Path, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and what one server alone says to them."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(3, 60) for _ in range(rng.choice((3, 17, 40, 90, 200)))]
        for _ in range(count)
    ]
    llm = LLM.from_manifest(manifest, Overrides(device="cpu"), needs_tokenizer=False)
    inputs = [
        RequestInput(request_id=str(i), prompt_ids_target=prompt, max_tokens=rng.randrange(4, 40))
        for i, prompt in enumerate(prompts)
    ]
    answers = [list(done.ids_target) for done in llm.generate(inputs)]
    return list(zip(prompts, answers, strict=True))


class Zygote:
    """Starts `specctl` commands; see `tests.dist.zygote`."""

    def __init__(self, log: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, log: Path, kill_file: Path, namespace: str, arguments: Sequence[str]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            line = json.dumps([str(log), str(kill_file), namespace, *arguments])
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@dataclass
class Server:
    """One server at a fixed address."""

    name: str
    directory: Path
    zygote: Zygote
    arguments: tuple[str, ...]
    port: int
    pid: int = 0
    namespace: str | None = None

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def kill_file(self) -> Path:
        return self.directory / f"{self.name}.kill"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.pid = self.zygote.start(self.log, self.kill_file, self.namespace or "", self.arguments)

    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}/cmdline").exists() and not self._is_zombie()

    def _is_zombie(self) -> bool:
        try:
            return ") Z " in Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return True

    def kill(self) -> None:
        if self.pid and self.is_alive():
            os.kill(self.pid, signal.SIGKILL)

    def get(self, path: str) -> httpx.Response:
        """Ask from the server's own namespace."""
        return within(
            self.namespace, lambda: httpx.get(f"{self.url}{path}", timeout=LIMIT_S, trust_env=False)
        )

    def wait_answering(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while True:
            try:
                if self.get("/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            is_late = time.monotonic() > limit or not self.is_alive()
            assert not is_late, self.log.read_text()[-3000:]
            time.sleep(0.05)

    def wait_idle(self) -> None:
        """Wait until no request, block or room is held; a leak never ends."""
        limit = time.monotonic() + LIMIT_S
        while True:
            text = self.get("/metrics").text
            lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
            found = {name: float(value) for name, _, value in lines}
            held = {name: found.get(f"specctl_{name}", 0) for name in HELD}
            if not any(held.values()):
                return
            assert time.monotonic() < limit, f"{self.name} holds {held}"
            time.sleep(0.1)


@dataclass
class Cluster:
    """The servers and what happened to the requests."""

    prefill: list[Server]
    decode: list[Server]
    router: Server
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def servers(self) -> list[Server]:
        return [*self.prefill, *self.decode]

    def ask(self, number: int, prompt: list[int], expected: list[int], *, is_stream: bool) -> bool:
        """Send one request and note how it ended; whether it ended well."""
        body = {"prompt": prompt, "max_tokens": len(expected), "return_token_ids": True}
        body |= {"stream": is_stream, "seed": number, "temperature": 0}
        answer = httpx.post(
            f"{self.router.url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False
        )
        ids, code = read_answer(answer, is_stream=is_stream)
        if code is not None:
            is_known = code in CODES and ids == expected[: len(ids)]
            self.outcomes[code] += 1
        else:
            is_known = ids == expected
            self.outcomes["right"] += 1
        if not is_known:
            self.wrong.append(f"request {number}: {code} {ids} instead of {expected}")
        return code is None

    def run(
        self,
        work: Sequence[tuple[list[int], list[int]]],
        kills: Sequence[tuple[str, str]],
        *,
        seed: int,
        num_clients: int = 4,
    ) -> None:
        """Send all requests while servers are killed one after the other.

        Args:
            work: prompts, and what one server says to each.
            kills: (side, moment) in order; requests go round until all are done, and as many have
                ended well as there are prompts.
            seed: of which server and which request comes when.
        """
        choose = random.Random(seed)
        done = threading.Event()
        sent = iter(range(1_000_000))

        def client(rng: random.Random) -> None:
            while self.outcomes["right"] < len(work) or not done.is_set():
                number = next(sent)
                prompt, expected = work[number % len(work)]
                if not self.ask(number, prompt, expected, is_stream=rng.random() < 0.5):
                    time.sleep(RETRY_S)  # as a client does; servers need time to come back

        with ThreadPoolExecutor(num_clients) as pool:
            clients = [
                pool.submit(client, random.Random(choose.random())) for _ in range(num_clients)
            ]
            try:
                for side, moment in kills:
                    self._kill(choose.choice(getattr(self, side)), f"{side} {moment}")
            finally:
                done.set()
            for item in clients:
                item.result()

    def _kill(self, victim: Server, moment: str) -> None:
        """Arm a kill, wait for it, start the server again."""
        victim.wait_answering()
        victim.kill_file.write_text(moment)
        limit = time.monotonic() + LIMIT_S
        while victim.is_alive():
            assert time.monotonic() < limit, f"{victim.name} never came to `{moment}`"
            time.sleep(0.01)
        self.outcomes[f"killed: {moment}"] += 1
        victim.start()


def read_answer(answer: httpx.Response, *, is_stream: bool) -> tuple[list[int], str | None]:
    """Return the token ids of an answer and the code of its error."""
    if answer.status_code != 200:
        return [], str(answer.json()["error"]["code"])
    if not is_stream:
        return list(answer.json()["choices"][0]["token_ids"]), None
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:]
    ids: list[int] = []
    for event in answer.text.split("\n\n"):
        if not event or event == "data: [DONE]":
            continue
        found = json.loads(event.removeprefix("data: "))
        if "error" in found:
            return ids, str(found["error"]["code"])
        for choice in found["choices"]:
            ids += choice.get("token_ids") or []
    return ids, None


@contextmanager
def cluster(manifest: Path, directory: Path, *, silence_s: float) -> Iterator[Cluster]:
    """Start everything; all of it is killed in the end."""
    zygote = Zygote(directory / "zygote.log")
    started: list[Server] = []

    def server(name: str, *arguments: str) -> Server:
        port = free_port()
        made = Server(name, directory, zygote, (*arguments, "--port", str(port)), port)
        started.append(made)
        made.start()
        return made

    serve = [
        *("serve", str(manifest), "--device", "cpu", "--max-num-requests", "8"),
        *("--num-kv-blocks", "256", "--peer-silence-s", str(silence_s)),
    ]
    try:
        listens = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        prefill = [
            server(f"prefill{i}", *serve, "--role", "prefill", "--listen", listen)
            for i, listen in enumerate(listens)
        ]
        decode = [
            server(f"decode{i}", *serve, "--role", "decode", "--peer", ",".join(listens))
            for i in range(2)
        ]
        addresses = ",".join(f"127.0.0.1:{item.port}" for item in decode)
        route = ("route", "--decode", addresses, "--health-interval-s", "0.2")
        router = server("router", *route)
        for item in (*prefill, *decode, router):
            item.wait_answering()
        yield Cluster(prefill, decode, router)
    finally:
        for item in started:
            item.kill()
        zygote.close()


def hold(server: Server, moment: str) -> None:
    """Let a server stop at its next such moment, until `release`."""
    held_file(server).unlink(missing_ok=True)
    server.kill_file.write_text(f"hold {moment}")


def release(server: Server) -> None:
    """Let a server go on."""
    server.kill_file.unlink(missing_ok=True)


def held_file(server: Server) -> Path:
    return server.kill_file.with_suffix(".held")


def wait_held(servers: list[Server]) -> int:
    """Return which of the servers came to its moment."""
    limit = time.monotonic() + LIMIT_S
    while True:
        for number, server in enumerate(servers):
            if held_file(server).exists():
                return number
        assert time.monotonic() < limit, "no server came to its moment"
        time.sleep(0.01)
