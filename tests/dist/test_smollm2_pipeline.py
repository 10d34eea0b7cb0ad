"""SmolLM2-135M over two and four stages: the text of one process, through a live server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.spec.types import SamplingParams
from specctl.contract.codec import dump_manifest, load_manifest
from specctl.contract.stage_split import split_stages
from specctl.ops.emit_manifest import emit_manifest
from tests import real_model
from tests.e2e.live import LiveServer, live_server

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
NUM_TOKENS = 32


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


def manifest_of(directory: Path, name: str) -> Path:
    """Write the manifest of a draft; prediction layers get the token map beside them."""
    if name == "eagle3":
        return real_model.write_manifest(directory)
    draft = real_model.shared_draft(f"smollm2-135m-{name}")
    if name != "mtp":
        return real_model.write_manifest(directory, draft, gamma=5)
    manifest = emit_manifest(
        str(real_model.target()),
        str(draft),
        manifest_dir=directory,
        num_speculative_tokens=3,
        token_map=str(draft / "token_map_8192.json"),
    )
    path = directory / "mtp.yaml"
    path.write_text(dump_manifest(manifest), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "num_stages"), [("eagle3", 2), ("dspark", 2), ("mtp", 4)])
def test_eighty_prompts_over_stages(tmp_path: Path, name: str, num_stages: int) -> None:
    """80/80 equal to one process, greedy and seeded, with its accept length."""
    prompts, references = real_model.all_eighty()
    manifest = manifest_of(tmp_path, name)
    given = Overrides(device="cpu", max_num_requests=8)
    alone = LLM.from_manifest(manifest, given)
    llm = LLM.from_manifest(manifest, replace(given, pipeline_parallel=num_stages))
    try:
        for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=7)):
            expected = real_model.answer(alone, prompts, params=params)
            found = real_model.answer(llm, prompts, params=params)
            assert [done.ids_target for done in found] == [done.ids_target for done in expected]
            one, many = alone.engine.stats(), llm.engine.stats()
            assert many.accept_length == one.accept_length
            if params.temperature == 0:
                assert (
                    sum(
                        list(done.ids_target) == text
                        for done, text in zip(found, references, strict=True)
                    )
                    >= 78
                )  # near-ties of another arithmetic
    finally:
        llm.close()
