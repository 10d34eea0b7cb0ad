"""Local servers that speak the protocols of Hugging Face and ModelScope, with faults on request.

One `MockHub` is two HTTP servers: the hub, and a second host that it redirects weight files to, as
the real hubs do. Every request is recorded with the bytes that were sent in answer. Faults are
queued for paths and used up one by one.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_local_test_token"
_MODELSCOPE = r"/api/v1/models/([^/]+/[^/]+)/(repo/files|revisions|repo)"


class Sparse:
    """A file of any size whose bytes after `head` are zero; nothing of them is stored."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head = head
        self.size = size

    def read(self, begin: int, end: int) -> bytes:
        part = self.head[begin:end]
        return part + bytes(end - begin - len(part))


@dataclass
class Repo:
    """Files and access of one repository."""

    files: dict[str, bytes | Sparse]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main", "master")
    gate: str | None = None  # None, "login" (any token) or "closed" (no token is enough)
    has_sizes: bool = True


@dataclass
class Fault:
    """What goes wrong with one request."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None  # body bytes, then the connection is closed
    ignore_range: bool = False
    wrong_range: bool = False
    stall_s: float = 0.0


@dataclass(frozen=True)
class Seen:
    """One request that a server got."""

    host: str
    method: str
    path: str
    authorization: str | None
    cookie: str | None
    range: str | None
    status: int
    num_bytes: int


class MockHub:
    """The pair of servers."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.seen: list[Seen] = []
        self.faults: list[tuple[str, Fault]] = []
        self.redirects_weights = True
        self.delay_s = 0.0
        self._lock = threading.Lock()
        # Two names of this machine: another host, as far as a client can tell.
        self._hub = _Server("127.0.0.1", "hub", self)
        self._cdn = _Server("localhost", "cdn", self)

    @property
    def endpoint(self) -> str:
        return self._hub.url

    @property
    def cdn(self) -> str:
        return self._cdn.url

    def fail(self, path_part: str, *faults: Fault) -> None:
        """Queue faults for requests whose path holds `path_part`."""
        self.faults += [(path_part, fault) for fault in faults]

    def take_fault(self, path: str) -> Fault | None:
        with self._lock:
            for place, (part, fault) in enumerate(self.faults):
                if part in path:
                    del self.faults[place]
                    return fault
        return None

    def record(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    @property
    def num_bytes(self) -> int:
        return sum(seen.num_bytes for seen in self.seen)

    def of(self, part: str) -> list[Seen]:
        return [seen for seen in self.seen if part in seen.path]

    def close(self) -> None:
        self._hub.close()
        self._cdn.close()


@contextmanager
def serving(repos: dict[str, Repo]) -> Iterator[MockHub]:
    """Run a hub while the block runs."""
    hub = MockHub(repos)
    try:
        yield hub
    finally:
        hub.close()


class _Server:
    def __init__(self, host: str, label: str, hub: MockHub) -> None:
        ThreadingHTTPServer.request_queue_size = 128  # five would drop parallel connections
        handler = type("Handler", (Handler,), {"hub": hub, "label": label})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    hub: MockHub
    label: str
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self._sent = 0
        self._status = 0
        if self.hub.delay_s:
            time.sleep(self.hub.delay_s)
        fault = self.hub.take_fault(self.path)
        # Recorded before the last byte leaves, or a test could look too early.
        with suppress(BrokenPipeError, ConnectionResetError):
            if fault is not None and fault.stall_s:
                time.sleep(fault.stall_s)
            if fault is not None and fault.status is not None:
                self.send(fault.status, fault.body, dict(fault.headers))
            else:
                self._route(fault or Fault())

    def _note(self, status: int, num_bytes: int) -> None:
        self.hub.record(
            Seen(
                host=self.label,
                method=self.command,
                path=self.path,
                authorization=self.headers.get("Authorization"),
                cookie=self.headers.get("Cookie"),
                range=self.headers.get("Range"),
                status=status,
                num_bytes=num_bytes,
            )
        )

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._note(status, len(body) if self.command == "GET" else 0)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_json(
        self, value: Any, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        body = json.dumps(value).encode()
        self.send(status, body, {"Content-Type": "application/json", **(headers or {})})

    def _refuse(self, status: int, code: str) -> None:
        self.send_json({"error": code}, {"X-Error-Code": code, "X-Error-Message": code}, status)

    def _route(self, fault: Fault) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if self.label == "cdn":
            repository, _, path = unquote(url.path[1:]).partition("//")
            self.send_file(self.hub.repos[repository].files[path], fault, {})
        elif match := re.fullmatch(_MODELSCOPE, url.path):
            from tests.mock_modelscope import ModelScopeRoutes  # it builds on this module

            ModelScopeRoutes(self, fault, query).answer(match[1], match[2])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", url.path):
            self._model_info(match[1], unquote(match[2] or "main"), "blobs" in query)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._resolve(match[1], unquote(match[2]), unquote(match[3]), fault)
        else:
            self.send(404, b"<html>nothing here</html>", {"Content-Type": "text/html"})

    def _repo(self, name: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None:
            self._refuse(404 if has_token else 401, "RepoNotFound")
        elif repo.gate == "closed" or (repo.gate == "login" and not has_token):
            self._refuse(403 if has_token else 401, "GatedRepo")
        elif revision not in (*repo.revisions, repo.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _model_info(self, name: str, revision: str, with_sizes: bool) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        siblings: list[dict[str, Any]] = []
        for path, content in repo.files.items():
            entry: dict[str, Any] = {"rfilename": path}
            if with_sizes and repo.has_sizes:
                entry |= {"size": size_of(content), "blobId": etag(content)}
            siblings.append(entry)
        self.send_json({"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings})

    def _resolve(self, name: str, revision: str, path: str, fault: Fault) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        content = repo.files.get(path)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{etag(content)}"'}
        is_weight = path.endswith((".safetensors", ".bin"))
        if is_weight and self.hub.redirects_weights:
            place = f"{self.hub.cdn}/{name}//{path}"
            linked = {"X-Linked-Size": str(size_of(content)), "X-Linked-Etag": headers["ETag"]}
            self.send(302, b"", {**headers, **linked, "Location": place})
            return
        self.send_file(content, fault, headers)

    def send_file(self, content: bytes | Sparse, fault: Fault, headers: dict[str, str]) -> None:
        size = size_of(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        begin, end, status = 0, size, 200
        if asked is not None and not fault.ignore_range:
            begin = int(asked[1])
            end = min(size, int(asked[2]) + 1) if asked[2] else size
            if begin >= size:
                self.send(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            status = 206
            shown = begin + 7 if fault.wrong_range else begin
            headers = {**headers, "Content-Range": f"bytes {shown}-{end - 1}/{size}"}
        self._stream(content, begin, end, fault, status, {**headers, "Accept-Ranges": "bytes"})

    def _stream(
        self,
        content: bytes | Sparse,
        begin: int,
        end: int,
        fault: Fault,
        status: int,
        headers: dict[str, str],
    ) -> None:
        stop = end if fault.cut_after is None else min(end, begin + fault.cut_after)
        is_get = self.command == "GET"
        if is_get and stop - begin <= 1 << 20:
            self._note(status, stop - begin)
        self.send_response(status)
        for name, value in {"Content-Length": str(end - begin), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not is_get:
            self._note(status, 0)
            return
        place = begin
        try:
            while place < stop:
                piece = read(content, place, min(place + (1 << 18), stop))
                self.wfile.write(piece)
                self.wfile.flush()
                place += len(piece)
        finally:
            if stop - begin > 1 << 20:
                self._note(status, place - begin)
        if stop < end:
            self.close_connection = True


def size_of(content: bytes | Sparse) -> int:
    return content.size if isinstance(content, Sparse) else len(content)


def read(content: bytes | Sparse, begin: int, end: int) -> bytes:
    return content.read(begin, end) if isinstance(content, Sparse) else content[begin:end]


def etag(content: bytes | Sparse) -> str:
    head = content.head if isinstance(content, Sparse) else content
    return hashlib.sha1(head).hexdigest()


def safetensors(tensors: dict[str, tuple[str, list[int], int]], data: bytes | None = None) -> bytes:
    """Return a file; `tensors` is name -> (dtype, shape, bytes)."""
    head = header(tensors)
    return head + (data if data is not None else bytes(sum(t[2] for t in tensors.values())))


def header(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """Return the length and the JSON of a header."""
    table: dict[str, Any] = {}
    place = 0
    for name, (dtype, shape, size) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    raw = json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw
