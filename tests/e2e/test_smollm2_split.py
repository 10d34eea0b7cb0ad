"""The real model over a prefill and a decode server: same tokens, same accepted drafts as one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests import real_model
from tests.e2e.split import Process, split_servers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--num-kv-blocks", "256")


def body(prompt: Sequence[int], *, max_tokens: int, seed: int | None) -> dict[str, object]:
    sampled: dict[str, object] = {"temperature": 0}
    if seed is not None:
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    return {"prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True} | sampled


def ask(process: Process, prompt: Sequence[int], *, max_tokens: int, seed: int | None) -> list[int]:
    answer = httpx.post(
        f"{process.url}/v1/completions",
        json=body(prompt, max_tokens=max_tokens, seed=seed),
        timeout=300,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def compare(
    directory: Path, prompts: Sequence[Sequence[int]], *, max_tokens: int, seed: int | None
) -> None:
    """Assert that two roles and one engine yield the same tokens in the same rounds."""
    manifest = real_model.write_manifest(directory)
    params = SamplingParams()
    if seed is not None:
        params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed)
    llm = real_model.load(manifest, speculative=True)
    inputs = [
        RequestInput(
            request_id=str(i), prompt_ids_target=tuple(ids), max_tokens=max_tokens, params=params
        )
        for i, ids in enumerate(prompts)
    ]
    expected = [list(done.ids_target) for done in llm.generate(inputs)]
    stats = llm.engine.stats()
    with split_servers(manifest, directory, *OPTIONS) as (prefill, decode):
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda ids: ask(decode[0], ids, max_tokens=max_tokens, seed=seed), prompts)
            )
        assert found == expected
        metrics = decode[0].wait_idle()
        prefill[0].wait_idle()
    assert metrics["specctl_rounds_total"] == stats.num_rounds
    assert metrics["specctl_accepted_drafts_total"] == stats.num_accepted_drafts
    assert metrics['specctl_handover_prompts_total{outcome="prefilled"}'] == len(prompts)
    config = llm.config
    kv_block_bytes = 0
    assert llm.caches is not None
    for layer in llm.caches.pool.layers:
        _, heads, size, dim = layer.k.shape
        kv_block_bytes += 2 * heads * size * dim * layer.k.dtype.itemsize
    num_blocks = sum(-(-len(ids) // config.kv_block_size) for ids in prompts)
    cached = metrics["specctl_prefix_hit_tokens_total"] // config.kv_block_size
    assert metrics["specctl_handover_kv_bytes_total"] <= num_blocks * kv_block_bytes
    if not cached:
        assert metrics["specctl_handover_kv_bytes_total"] == num_blocks * kv_block_bytes


def test_four_prompts_over_two_roles_equal_one_engine(tmp_path: Path) -> None:
    prompts, _ = real_model.first_eight()
    compare(tmp_path, prompts[:4], max_tokens=16, seed=None)
