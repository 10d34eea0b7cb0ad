"""The real model on CUDA in bf16: right, row-invariant, and equal with and without a draft.

Figures are printed (run with `-s`) and stated in docs/benchmarks/. Without the 80 prompts the
bundled eight are used.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.models import TargetModel
from tests import real_model
from tests.figures import LogitFigures
from tests.invariance import RESIDUAL_LINEAR, row_dependent_residual_linear, verify_mismatches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# Two bf16 implementations may swap two tokens whose float32 logits are this close. Logits are of
# magnitude 16 to 32, where one bf16 step is 0.125.
NEAR_TIE = 0.5


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_model.write_manifest(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def target(manifest: Path) -> Iterator[TargetModel]:
    yield real_model.load_target(manifest, device="cuda", dtype=torch.bfloat16)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    if (real_model.SHARED / "data" / "prompts").is_dir():
        return real_model.all_eighty()[0]
    return real_model.first_eight()[0]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Prompts with their float32 answers."""
    if (real_model.SHARED / "data" / "prompts").is_dir():
        prompts, answers = real_model.all_eighty()
    else:
        prompts, answers = real_model.first_eight()
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]


def test_logits_against_transformers(target: TargetModel, texts: list[list[int]]) -> None:
    """Prompts and their answers: as near to float32 as transformers' own bf16 is.

    The two round in other places (transformers rotates in bf16, we in float32), so neither bounds
    the other; float32 is the judge. Flipped argmaxes are shown with their float32 margins.
    """
    from transformers import AutoModelForCausalLM

    models = {
        dtype: AutoModelForCausalLM.from_pretrained(real_model.target(), dtype=dtype).cuda()
        for dtype in (torch.float32, torch.bfloat16)
    }
    figures = LogitFigures()
    for ids in texts:
        tokens = torch.tensor(ids, device="cuda")
        with torch.no_grad():
            exact, theirs = (model(tokens[None]).logits[0].float() for model in models.values())
        figures.add(real_model.prompt_logits(target, tokens), theirs, exact, tokens)
    report = figures.report()
    _publish("logits_against_transformers", report)
    ours, theirs_ = report["ours_to_float32"], report["transformers_bf16_to_float32"]
    assert ours["mean"] <= 1.05 * theirs_["mean"]
    assert ours["max"] <= 1.25 * theirs_["max"]  # a largest error is one draw of rounding luck
    assert report["argmax_flips_to_float32"]["ours"]["largest_margin"] <= NEAR_TIE
    assert report["perplexity"]["ours"] == pytest.approx(
        report["perplexity"]["transformers_bf16"], rel=0.005
    )
    assert report["perplexity"]["ours"] == pytest.approx(
        report["perplexity"]["transformers_float32"], rel=0.005
    )


def test_verify_rows_equal_single_steps(target: TargetModel) -> None:
    """Ladder step 3: whole-model logits of M rows and of M single steps, M in 1..64."""
    assert verify_mismatches(target, prefix=70, row_counts=range(1, 65)) == []


def test_negative_control_fails(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a K split that follows M, rows differ."""
    monkeypatch.setattr(RESIDUAL_LINEAR, row_dependent_residual_linear)
    assert verify_mismatches(target, prefix=70, row_counts=range(1, 65)) != []


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_equals_target_only(
    manifest: Path, prompts: list[list[int]], concurrency: int
) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "concurrency": concurrency}
    plain = real_model.load(manifest, speculative=False, **options)
    without = [d.ids_target for d in real_model.answer(plain, prompts)]
    speculative = real_model.load(manifest, speculative=True, **options)
    with_draft = [d.ids_target for d in real_model.answer(speculative, prompts)]
    stats = speculative.engine.stats()
    equal = sum(a == b for a, b in zip(without, with_draft, strict=True))
    _publish(
        f"greedy_concurrency_{concurrency}",
        {
            "equal": equal,
            "total": len(prompts),
            "rounds": stats.num_rounds,
            "accepted": stats.num_accepted_drafts,
            "accept_length": stats.accept_length,
        },
    )
    assert equal == len(prompts)
    assert stats.accept_length is not None
    if len(prompts) == 80:
        assert stats.accept_length == pytest.approx(2.36, abs=0.04)


def _publish(name: str, figures: dict[str, Any]) -> None:
    """Print the figures, and keep them when $SPECCTL_FIGURES names a directory."""
    text = json.dumps({name: figures}, indent=1)
    print(text)  # noqa: T201 (figures of a GPU run are read from its output)
    folder = os.environ.get("SPECCTL_FIGURES")
    if folder:
        (Path(folder) / f"{name}.json").write_text(text + "\n", encoding="utf-8")
