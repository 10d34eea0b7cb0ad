"""A prefill and a decode server as processes on a CPU, asked over HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from runtime.engine.request import RequestInput
from tests.e2e.split import split_servers

NUM_CLIENTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What the decode server said and counted."""

    ids_target: list[list[int]]
    num_rounds: int
    num_accepted_drafts: int
    seconds: float


def body_of(request: RequestInput) -> dict[str, object]:
    """Return a request as a client writes it."""
    params = request.params
    body: dict[str, object] = {
        "prompt": list(request.prompt_ids_target),
        "max_tokens": request.max_tokens,
        "temperature": params.temperature,
        "return_token_ids": True,
    }
    return body | ({"top_p": params.top_p, "seed": params.seed} if params.temperature else {})


def answers(
    manifest: Path,
    requests: Sequence[RequestInput],
    *,
    options: Sequence[str],
    prefill_options: Sequence[str],
) -> Served:
    """Answer all requests; nothing is held afterwards on either side."""
    with split_servers(manifest, manifest.parent, *options, prefill_options=prefill_options) as (
        prefill,
        decode,
    ):
        url = f"{decode[0].url}/v1/completions"

        def ask(request: RequestInput) -> list[int]:
            answer = httpx.post(url, json=body_of(request), timeout=3600, trust_env=False)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        began = time.monotonic()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            found = list(pool.map(ask, requests))
        seconds = time.monotonic() - began
        metrics = decode[0].wait_idle()
        prefill[0].wait_idle()
    return Served(
        ids_target=found,
        num_rounds=int(metrics["specctl_rounds_total"]),
        num_accepted_drafts=int(metrics["specctl_accepted_drafts_total"]),
        seconds=seconds,
    )
