"""Prefill and decode servers of several processes: the layout of the source document, over HTTP.

What a layout says without a draft comes from its twin, whose ranks are threads: KV of the same
shards, sums in the same order.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from runtime.disagg.outbox import wire_bytes
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.parallel.ranks import Ranks
from runtime.spec.types import SamplingParams
from specctl.contract.codec import load_manifest
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.dist.cluster import LIMIT_S, Server, Zygote, read_answer
from tests.engine_harness import prompt_of
from tests.pd_layouts import NUM_LAYERS, System
from tests.ports import free_port
from tests.rank_harness import SMALL, answer, on_rank_pairs, ranked_engine
from tests.tiny import Sizes, write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_last_state import write_mtp
from tests.tiny_manifest import write_manifest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

SERVED = replace(SMALL, kv_block_size=16, num_kv_blocks=40, max_model_len=128)
SIZES = Sizes(hidden=32, heads=4, kv_heads=4, head_dim=8, inner=64)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 5 + 19 * index),
        params=params,
        max_tokens=12,
        ignore_eos=True,
    )
    for index, params in enumerate(
        (
            SamplingParams(),
            SamplingParams(temperature=0.8, seed=7),
            SamplingParams(temperature=1.0, seed=9),
        )
    )
)


class Servers:
    """Servers of one manifest; all are killed in the end."""

    def __init__(self, manifest: Path, directory: Path) -> None:
        self.manifest = manifest
        self._directory = directory
        self._zygote = Zygote(directory / "zygote.log")
        self._started: list[Server] = []

    def start(self, name: str, role: str, address: str, *layout: str) -> Server:
        port = free_port()
        where = ("--listen", address)
        if role == "decode":
            where = ("--peer", address, "--peer-wait-s", "2")
        arguments = (
            *("serve", str(self.manifest), "--device", "cpu", "--dtype", "float32"),
            *("--max-num-requests", "3", "--num-kv-blocks", "40", "--max-model-len", "128"),
            *("--peer-silence-s", "6", "--role", role, *where, *layout, "--port", str(port)),
        )
        made = Server(name, self._directory, self._zygote, arguments, port)
        self._started.append(made)
        made.start()
        return made

    def close(self) -> None:
        for server in self._started:
            server.kill()
        self._zygote.close()


@pytest.fixture
def opened() -> Iterator[list[Servers]]:
    made: list[Servers] = []
    yield made
    for item in made:
        item.close()


def eagle3(directory: Path) -> Path:
    target = write_tiny_target(directory / "t", num_layers=NUM_LAYERS, layer_gain=0.15, sizes=SIZES)
    draft = write_agreeing_eagle3(directory / "d", target)
    return write_manifest(
        directory, emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    )


def mtp(directory: Path) -> Path:
    target = write_tiny_target(directory / "t", num_layers=NUM_LAYERS, layer_gain=0.15, sizes=SIZES)
    draft = write_mtp(directory / "d", target, num_layers=2, is_agreeing=True)
    return write_manifest(
        directory, emit_manifest(str(target), str(draft), num_speculative_tokens=2)
    )


def ask(server: Server, request: RequestInput) -> tuple[tuple[int, ...], int, str | None]:
    """Return ids, accepted drafts and the code of an error."""
    params = request.params
    body = {
        "prompt": list(request.prompt_ids_target),
        "max_tokens": request.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
    ids, code = read_answer(answer, is_stream=False)
    if code is not None:
        return tuple(ids), 0, code
    details = answer.json()["usage"]["completion_tokens_details"]
    return tuple(ids), details["accepted_prediction_tokens"], None


def ask_all(server: Server, requests: Sequence[RequestInput]) -> list[tuple[tuple[int, ...], int]]:
    """Ask at once, so that requests share rounds."""
    with ThreadPoolExecutor(len(requests)) as pool:
        found = list(pool.map(lambda item: ask(server, item), requests))
    assert [code for *_, code in found] == [None] * len(requests), server.log.read_text()[-4000:]
    return [(ids, accepted) for ids, accepted, _ in found]


def of_threads(
    manifest: Path, *, prefill: tuple[int, int], decode: int, is_draft_split: tuple[bool, bool]
) -> list[tuple[int, ...]]:
    """Return what the same layout says without a draft, every rank a thread."""
    read: Manifest = load_manifest(manifest)
    system = System(
        read,
        replace(SERVED, proposer="none"),
        prefill=prefill,
        decode=decode,
        is_draft_split=is_draft_split,
    )
    answers, _ = system.serve(REQUESTS).answers()
    return [answers[item.request_id] for item in REQUESTS]


def check(
    found: Sequence[tuple[tuple[int, ...], int]], expected: Sequence[tuple[int, ...]]
) -> None:
    assert [ids for ids, _ in found] == list(expected)
    assert sum(accepted for _, accepted in found) > 3


def kv_bytes(manifest: Path, *, num_draft_copies: int = 1) -> int:
    """Return what the requests' KV is, each draft layer on so many ranks."""
    read = load_manifest(manifest)
    assert read.draft is not None
    draft = read.draft.decoder
    heads = [4] * NUM_LAYERS + [num_draft_copies * draft.num_kv_heads] * draft.num_layers
    block_bytes = [2 * count * 16 * 8 * 4 for count in heads]
    return sum(
        wire_bytes(
            len(item.prompt_ids_target), first_position=0, kv_block_size=16, block_bytes=block_bytes
        )
        for item in REQUESTS
    )


def sent_bytes(server: Server) -> int:
    lines = httpx.get(f"{server.url}/metrics", timeout=LIMIT_S, trust_env=False).text.splitlines()
    name = "specctl_handover_kv_bytes_total "
    return int(float(next(line for line in lines if line.startswith(name)).removeprefix(name)))


def test_two_stages_to_one_process_and_to_two_stages(tmp_path: Path, opened: list[Servers]) -> None:
    """The answers of one process, from either decode server."""
    servers = Servers(eagle3(tmp_path), tmp_path)
    opened.append(servers)
    address = f"127.0.0.1:{free_port()}"
    prefill = servers.start("prefill", "prefill", address, "--pp", "2")
    one = servers.start("one", "decode", address)
    two = servers.start("two", "decode", address, "--pp", "2")
    alone = LLM.from_manifest(servers.manifest, replace(SERVED, proposer="none"))
    expected = [done.ids_target for done in alone.generate(REQUESTS)]
    prefill.wait_answering()
    for decode in (one, two):
        decode.wait_answering()
        check(ask_all(decode, REQUESTS), expected)
        assert sent_bytes(decode) == kv_bytes(servers.manifest)
    for server in (prefill, one, two):
        server.wait_idle()


def children(server: Server) -> list[int]:
    """Return the other processes of a server, by rank."""
    text = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text("utf-8")
    found = [int(pid) for pid in text.split()]
    return [pid for pid in found if "stage_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def wait_unhealthy(server: Server) -> None:
    limit = time.monotonic() + LIMIT_S
    while httpx.get(f"{server.url}/health", timeout=LIMIT_S, trust_env=False).status_code == 200:
        assert time.monotonic() < limit, f"{server.name} is healthy"
        time.sleep(0.1)


def outcomes(server: Server, pid: int) -> set[str | None]:
    """Kill a process while requests run, ask on, and return the codes that they ended with."""
    long = [replace(item, max_tokens=70) for item in REQUESTS]
    with ThreadPoolExecutor(len(long)) as pool:
        running = [pool.submit(ask, server, item) for item in long]
        os.kill(pid, signal.SIGKILL)
        codes = {item.result()[2] for item in running}
    return codes | {ask(server, REQUESTS[0])[2]}


def test_the_layout_of_the_source_document(tmp_path: Path, opened: list[Servers]) -> None:
    """Two stages of two ranks to four ranks; then a rank of either side is killed."""
    servers = Servers(eagle3(tmp_path), tmp_path)
    opened.append(servers)
    address = f"127.0.0.1:{free_port()}"
    prefill = servers.start("prefill", "prefill", address, "--pp", "2", "--tp", "2")
    four = servers.start("four", "decode", address, "--tp", "4", "--draft-tp", "1")
    two = servers.start("two", "decode", address, "--tp", "2")
    layout = {"prefill": (2, 2), "decode": 4, "is_draft_split": (True, False)}
    expected = of_threads(servers.manifest, **layout)  # type: ignore[arg-type]
    for server in (prefill, four, two):
        server.wait_answering()
    check(ask_all(four, REQUESTS), expected)
    assert sent_bytes(four) == kv_bytes(servers.manifest, num_draft_copies=4)
    aggregated = on_rank_pairs(2, lambda ranks, _: alone_on(servers.manifest, ranks))[0]
    check(ask_all(two, REQUESTS), aggregated)

    assert outcomes(four, children(four)[-1]) == {"SD855"}
    wait_unhealthy(four)
    prefill.wait_idle()
    check(ask_all(two, REQUESTS), aggregated)

    assert outcomes(two, children(prefill)[-1]) == {"SD861"}
    wait_unhealthy(prefill)
    two.wait_idle()


def alone_on(manifest: Path, ranks: Ranks) -> list[tuple[int, ...]]:
    """Return what the ranks of one server say without a draft."""
    engine = ranked_engine(load_manifest(manifest), ranks, replace(SERVED, proposer="none"))
    ids = answer(engine, REQUESTS).ids_target
    return [ids[item.request_id] for item in REQUESTS]


@pytest.mark.slow
def test_prediction_layers_in_the_layout_of_the_source_document(
    tmp_path: Path, opened: list[Servers]
) -> None:
    servers = Servers(mtp(tmp_path), tmp_path)
    opened.append(servers)
    address = f"127.0.0.1:{free_port()}"
    prefill = servers.start("prefill", "prefill", address, "--pp", "2", "--tp", "2")
    decode = servers.start("decode", "decode", address, "--tp", "4", "--draft-tp", "1")
    expected = of_threads(servers.manifest, prefill=(2, 2), decode=4, is_draft_split=(True, False))
    for server in (prefill, decode):
        server.wait_answering()
    check(ask_all(decode, REQUESTS), expected)
    for server in (prefill, decode):
        server.wait_idle()
