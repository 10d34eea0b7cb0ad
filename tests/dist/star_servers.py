"""Servers in the network namespaces of a star, and how one of them is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import httpx

from tests.dist.cluster import LIMIT_S, Server, Zygote, prompts_and_answers, read_answer, write_pair
from tests.dist.namespaces import Star, star, within

PORT, LISTEN = 8000, 9000
SILENCE_S = 3.0  # a server that has too little of a busy machine is not to be taken for cut off
Work: TypeAlias = list[tuple[list[int], list[int]]]


class StarServers:
    """Two namespaces around a middle one, with servers that a test starts in them.

    Args:
        star: the namespaces and their cables.
        work: prompts, and what one server alone says to each.
    """

    def __init__(self, directory: Path, made: Star, zygote: Zygote, *options: str) -> None:
        self.star = made
        self.servers: list[Server] = []
        manifest = write_pair(directory)
        self.work: Work = prompts_and_answers(manifest, 6, seed=5)
        self._directory = directory
        self._zygote = zygote
        self._serve = (
            *("serve", str(manifest), "--device", "cpu", "--max-num-requests", "4"),
            *("--num-kv-blocks", "128", "--peer-silence-s", str(SILENCE_S), "--port", str(PORT)),
            *options,
        )

    def start(self, name: str, namespace: str, *options: str) -> Server:
        arguments = (*self._serve, *options)
        server = Server(name, self._directory, self._zygote, arguments, PORT, namespace=namespace)
        self.servers.append(server)
        server.start()
        return server

    def wait_answering(self) -> None:
        for server in self.servers:
            server.wait_answering()


@contextmanager
def star_servers(directory: Path, *options: str) -> Iterator[StarServers]:
    """Make a star without servers yet; what is started in it is killed in the end."""
    zygote = Zygote(directory / "zygote.log")
    with star(2) as made:
        servers: list[Server] = []
        try:
            site = StarServers(directory, made, zygote, *options)
            servers = site.servers
            yield site
        finally:
            for item in servers:
                item.kill()
            zygote.close()


def ask(server: Server, work: tuple[list[int], list[int]]) -> tuple[list[int], str | None]:
    """Return the ids that a server answers to a prompt, and the code of its error."""
    prompt, expected = work
    body = {"prompt": prompt, "max_tokens": len(expected), "return_token_ids": True}
    url = f"{server.url}/v1/completions"
    answer = within(
        server.namespace,
        lambda: httpx.post(url, json=body | {"temperature": 0}, timeout=LIMIT_S, trust_env=False),
    )
    return read_answer(answer, is_stream=False)
