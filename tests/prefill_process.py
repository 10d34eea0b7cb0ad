"""A prefill server without HTTP, as a process: it prints its address and ends with its input."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from runtime.disagg.carriers import make_transport
from runtime.engine.llm import LLM
from runtime.server.role_settings import RoleOptions
from runtime.server.roles import PrefillRole, role_plan
from tests.parallel_cases import small


def main(manifest: Path, device: str) -> None:
    """Serve until standard input ends."""
    transport = make_transport("shared", host="127.0.0.1")
    llm = LLM.from_manifest(manifest, small(device), needs_tokenizer=False)
    options = RoleOptions(role="prefill", listen="127.0.0.1:0")
    role = PrefillRole(llm, role_plan(options, weights=""), options, transport)
    news, is_over = threading.Event(), threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        is_over.set()
        news.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    role.start(news.set)
    print(role.peers.address, flush=True)  # noqa: T201 - the parent reads it
    while not is_over.is_set():
        news.wait()
        news.clear()
        while role.engine.has_work and not is_over.is_set():
            role.engine.step()
    role.close()
    llm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
