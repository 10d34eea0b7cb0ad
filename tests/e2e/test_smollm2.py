"""The real model on CPU, float32: equal with and without a draft, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.engine.llm import LLM
from runtime.spec.types import SamplingParams
from tests import real_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TEXT = (
    "The industrial revolution was the transition to new manufacturing processes in Europe and the "
    "United States. It began in Great Britain and spread to the rest of the world, changing how "
    "people worked and lived."
)


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    manifest = real_model.write_manifest(tmp_path_factory.mktemp("smollm2"))
    return real_model.load(manifest, speculative=True)


@pytest.fixture(scope="module")
def plain(speculative: LLM) -> LLM:
    """Target-only over the same weights, with a KV pool of its own."""
    return speculative.sibling(proposer="none", num_speculative_tokens=0)


def test_greedy_equals_target_only_and_the_reference(plain: LLM, speculative: LLM) -> None:
    prompts, references = real_model.first_eight()
    without = real_model.answer(plain, prompts[:2], max_tokens=24)
    with_draft = real_model.answer(speculative, prompts[:4], max_tokens=32)
    assert [list(done.ids_target) for done in with_draft] == [ids[:32] for ids in references[:4]]
    assert [list(done.ids_target) for done in without] == [ids[:24] for ids in references[:2]]
    accept_length = speculative.engine.stats().accept_length
    assert accept_length is not None
    assert accept_length > 1.6


@pytest.mark.slow
def test_eight_whole_answers(plain: LLM, speculative: LLM) -> None:
    speculative.engine.flush_cache()
    prompts, references = real_model.first_eight()
    without = [list(done.ids_target) for done in real_model.answer(plain, prompts)]
    with_draft = [list(done.ids_target) for done in real_model.answer(speculative, prompts)]
    assert with_draft == without
    assert without == references
    stats = speculative.engine.stats()
    accept_length = 1 + stats.num_accepted_drafts / stats.num_rounds
    # float32 reference on these eight: 1.977 (facts of the draft); the draft's own arithmetic is
    # not part of the contract, so a near-tie may move a draft token.
    assert accept_length == pytest.approx(1.977, abs=0.03)


def test_seeded_sampling_equals_target_only(plain: LLM, speculative: LLM) -> None:
    prompts, _ = real_model.first_eight()
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=7)
    without = real_model.answer(plain, prompts[:2], max_tokens=20, params=params)
    with_draft = real_model.answer(speculative, prompts[:2], max_tokens=20, params=params)
    assert [d.ids_target for d in with_draft] == [d.ids_target for d in without]
    greedy = [tuple(ids[:20]) for ids in real_model.first_eight()[1]]
    assert any(done.ids_target != text for done, text in zip(without, greedy, strict=False))


def test_perplexity_shows_that_q_and_k_rows_are_in_place(plain: LLM) -> None:
    """Interleaved q/k rows still give fluent-looking text; perplexity then doubles."""
    assert plain.tokenizer is not None
    ids = torch.tensor(plain.tokenizer.encode(TEXT, add_special_tokens=False).ids)
    logits = real_model.prompt_logits(plain.models.target, ids)
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:])
    # transformers' LlamaForCausalLM on the same weights and text: 11.516 (float32).
    assert float(loss.exp()) == pytest.approx(11.516, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-eagle3", "smollm2-135m-eagle3-safeailab"])
@pytest.mark.timeout(5400)
def test_bench_of_eighty_prompts(name: str, tmp_path: Path) -> None:
    """`specctl bench`, both layouts of the draft: 80/80 equal, accept length 2.351 +- 0.03."""
    prompts = real_model.shared_prompts()
    manifest = real_model.write_manifest(tmp_path, real_model.shared_draft(name))
    output = real_model.figures_folder(tmp_path) / f"bench_{name}_cpu_float32"
    command = [
        *(sys.executable, "-m", "specctl", "bench", str(manifest), "--device", "cpu"),
        *("--prompts", str(prompts / "smollm2_prompt_ids.json"), "--set", "mt_bench"),
        *("--reference", str(prompts / "smollm2_mt_bench_greedy128.json")),
        *("--reference-set", "f32", "--max-tokens", "128", "--concurrency", "8"),
        *("--gamma", "4", "--repeats", "1", "--step-samples", "3", "--output", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((output / "summary.json").read_text("utf-8"))
    assert report["identical"] == {"equal": 80, "total": 80, "first_divergence": None}
    assert report["reference"]["equal"] >= 78, report["reference"]["differences"]
    assert report["points"][0]["accept_length"] == pytest.approx(2.351, abs=0.03)
