"""SmolLM2-135M over three ranks, which divide its nine heads and three KV heads; two do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.config import Overrides, resolve_config
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from tests import real_model
from tests.rank_harness import Outcome, answer, on_ranks, ranked_engine

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
SETTINGS = Overrides(
    device="cpu", dtype="float32", max_num_requests=4, max_model_len=256, num_kv_blocks=65
)
NUM_TOKENS = 16


def manifest_of(directory: Path, draft: Path) -> Manifest:
    path = real_model.write_manifest(directory, draft)
    return load_manifest(path)


def requests() -> list[RequestInput]:
    """Four prompts, one of them sampled."""
    prompts, _ = real_model.first_eight()
    short = sorted(prompts, key=len)[:4]
    return [
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=tuple(ids),
            params=SamplingParams(temperature=0.7 * (index == 3), seed=index),
            max_tokens=NUM_TOKENS,
        )
        for index, ids in enumerate(short)
    ]


def run(manifest: Manifest, overrides: Overrides) -> list[Outcome]:
    return on_ranks(3, lambda ranks: answer(ranked_engine(manifest, ranks, overrides), requests()))


def test_eagle3_over_three_ranks_gives_the_text_of_three_ranks_without_it(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, real_model.DRAFT)
    alone = run(manifest, replace(SETTINGS, proposer="none"))
    drafted = run(manifest, SETTINGS)
    for outcome in (*alone, *drafted):
        assert outcome.ids_target == alone[0].ids_target
    for outcome in drafted:
        assert outcome.usages == drafted[0].usages
    assert drafted[0].num_accepted_drafts > 10


def test_two_ranks_are_refused_with_the_numbers(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, real_model.DRAFT)
    with pytest.raises(DiagnosticError) as caught:
        resolve_config(manifest, replace(SETTINGS, tensor_parallel=2))
    assert [(item.code, item.expected) for item in caught.value.diagnostics] == [
        ("SD852", "a divisor of 9"),
        ("SD852", "a divisor of 3"),
    ] * 2
