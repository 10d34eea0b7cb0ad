"""KV travels over the cable that is pulled out: real libraries between network namespaces.

A prefill server writes to two decode servers. The cable to one of them is pulled out amid a
transfer; the other one is served on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.dist.cluster import (
    LIMIT_S,
    Server,
    Zygote,
    hold,
    prompts_and_answers,
    read_answer,
    release,
    wait_held,
    write_pair,
)
from tests.dist.namespaces import Star, star, why_not, within
from tests.dist.test_library_transports import is_installed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
PORT, LISTEN = 8000, 9000
Work = list[tuple[list[int], list[int]]]


@pytest.fixture(params=["shared", "nixl", "mooncake"])
def carrier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "shared" and not is_installed(name):
        pytest.skip(f"extra `{name}` is not installed here")
    return name


@pytest.fixture
def site(carrier: str, tmp_path: Path) -> Iterator[tuple[Star, Server, list[Server], Work]]:
    manifest = write_pair(tmp_path)
    zygote = Zygote(tmp_path / "zygote.log")
    serve = [
        *("serve", str(manifest), "--device", "cpu", "--max-num-requests", "4"),
        *("--num-kv-blocks", "128", "--peer-silence-s", "1.5", "--port", str(PORT)),
        *("--transport", carrier),
    ]
    has_host = carrier == "mooncake"
    servers: list[Server] = []

    def server(name: str, namespace: str, *options: str) -> Server:
        made = Server(name, tmp_path, zygote, (*serve, *options), PORT, namespace=namespace)
        servers.append(made)
        made.start()
        return made

    with star(2) as made:
        try:
            listen = ("--role", "prefill", "--listen", f"0.0.0.0:{LISTEN}")
            listen += ("--transfer-timeout-s", "5")
            prefill = server("prefill", made.middle, *listen)
            decode = [
                server(
                    *(f"decode{number}", made.others[number], "--role", "decode"),
                    *("--peer", f"{made.address(number, of_middle=True)}:{LISTEN}"),
                    *(("--transport-host", made.address(number)) if has_host else ()),
                )
                for number in range(2)
            ]
            for item in servers:
                item.wait_answering()
            yield made, prefill, decode, prompts_and_answers(manifest, 6, seed=5)
        finally:
            for item in servers:
                item.kill()
            zygote.close()


def ask(decode: Server, work: tuple[list[int], list[int]]) -> tuple[list[int], str | None]:
    prompt, expected = work
    body = {"prompt": prompt, "max_tokens": len(expected), "return_token_ids": True}
    answer = within(
        decode.namespace,
        lambda: httpx.post(
            f"{decode.url}/v1/completions",
            json=body | {"temperature": 0},
            timeout=90,
            trust_env=False,
        ),
    )
    return read_answer(answer, is_stream=False)


def test_other_decode_servers_are_served_while_one_is_cut_off(
    site: tuple[Star, Server, list[Server], Work],
) -> None:
    made, prefill, decode, work = site
    for number, server in enumerate(decode):
        assert ask(server, work[number]) == (work[number][1], None)
    hold(prefill, "prefill during")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask, decode[0], work[4])
        wait_held([prefill])
        made.cut(0)
        release(prefill)
        for number in (2, 3, 5):
            assert pool.submit(ask, decode[1], work[number]).result(LIMIT_S) == (
                work[number][1],
                None,
            )
        assert asked.result(LIMIT_S) == ([], "SD861")
    for server in (prefill, *decode):
        server.wait_idle()
        assert "Traceback" not in server.log.read_text()
