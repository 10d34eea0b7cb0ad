"""SmolLM2-135M over two stages: the text of one process, through a live server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specctl.contract.codec import load_manifest
from specctl.contract.stage_split import split_stages
from tests import real_model
from tests.e2e.live import LiveServer, live_server

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
NUM_TOKENS = 16


def test_four_prompts_over_two_stages(tmp_path: Path) -> None:
    """Float32 greedy answers of a plain loop; accepted drafts are counted by the last stage."""
    prompts, references = real_model.first_eight()
    order = sorted(range(8), key=lambda index: len(prompts[index]))[:4]
    manifest = real_model.write_manifest(tmp_path)
    options = ("--pp", "2", "--max-num-requests", "4", "--num-kv-blocks", "129")
    with live_server(manifest, tmp_path / "log", *options, "--max-model-len", "512") as server:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda index: complete(server, prompts[index]), order))
        metrics = server.wait_until_idle()
        server.terminate()
        assert server.exit_code() == 0
        log = server.log.read_text("utf-8")
    assert found == [references[index][:NUM_TOKENS] for index in order]
    assert metrics["specctl_accept_length"] > 1.5
    layers = "+".join(str(stage.num_layers) for stage in split_stages(load_manifest(manifest), 2))
    assert f"2 stages ({layers} layers) in processes over gloo" in log
    assert "draft on stage 1 (embedding: head)" in log


def complete(server: LiveServer, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    answer = server.http.post("/v1/completions", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids
