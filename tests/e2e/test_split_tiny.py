"""Prefill and decode servers of the tiny pair: same text as one server, through CLI and router."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.e2e.live import LiveServer
from tests.e2e.split import LIMIT_S, running, split_servers

PROMPTS = ([5, 6, 7, 8, 9], list(range(3, 60)), [11] * 33, [7, 3] * 20)


def body(prompt: list[int], **changes: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True} | (
        changes
    )


def ids(url: str, prompt: list[int], **changes: object) -> list[int]:
    answer = httpx.post(f"{url}/v1/completions", json=body(prompt, **changes), timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_two_roles_and_a_router_say_what_one_server_says(
    tiny_pair: Path, server: LiveServer, tmp_path: Path
) -> None:
    with split_servers(tiny_pair, tmp_path) as (prefill, decode):
        route = ("route", "--decode", decode[0].address, "--port", "0")
        with running(route, tmp_path / "router.log") as router:
            router.wait_healthy()
            for prompt in PROMPTS:
                assert ids(router.url, prompt) == ids(server.url, prompt)
                seeded = {"temperature": 0.9, "seed": 5}
                assert ids(router.url, prompt, **seeded) == ids(server.url, prompt, **seeded)
        found = decode[0].wait_idle()
        assert found['specctl_handover_prompts_total{outcome="prefilled"}'] == 2 * len(PROMPTS)
        assert found["specctl_rounds_total"] > 0
        kept = prefill[0].wait_idle()
        assert kept["specctl_handover_kv_bytes_total"] == found["specctl_handover_kv_bytes_total"]
        assert found["specctl_handover_kv_bytes_total"] > 0
        assert "role decode, prefill servers" in decode[0].log.read_text()
        assert httpx.post(f"{prefill[0].url}/v1/completions", json=body([5])).status_code == 404
        decode[0].stop()
        assert prefill[0].find(re.compile(r"decode server (\S+) has ended"))
        assert "SD861" not in prefill[0].log.read_text()


@pytest.mark.parametrize("proposer", ["none"])
def test_sides_with_other_drafts_say_so(tiny_pair: Path, tmp_path: Path, proposer: str) -> None:
    serve = ("serve", str(tiny_pair), "--device", "cpu", "--port", "0")
    plain = (*serve, "--role", "prefill", "--listen", "127.0.0.1:0", "--proposer", proposer)
    with running(plain, tmp_path / "prefill.log") as prefill:
        decode_arguments = (*serve, "--role", "decode", "--peer", prefill.listen)
        with running(decode_arguments, tmp_path / "decode.log") as decode:
            answer = httpx.post(f"{decode.url}/v1/completions", json=body([5]), timeout=LIMIT_S)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "SD860"
            assert "proposer=none" in answer.text
            assert "proposer=draft" in answer.text or "proposer=eagle3" in answer.text
            status, health = decode.health()
            assert status == 503
            assert "SD860" in str(health)
