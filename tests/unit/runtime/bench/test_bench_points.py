"""Oracle, forced lengths, random weights, and the arm without the contract."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from runtime import main
from runtime.bench.arms import acceptance_for
from runtime.bench.bandwidth import weight_bytes_per_step
from runtime.bench.contract_off import FreeChoices, free_models, tune_products
from runtime.bench.margin import top_two_after
from runtime.bench.prompts import random_prompts
from runtime.bench.shape import shape_manifest
from runtime.config import RuntimeConfig
from runtime.engine.llm import LLM
from runtime.engine.staged import StagedModels
from runtime.loading import LoadedModels
from runtime.spec.ngram import NgramProposer
from runtime.spec.script_table import Room
from specctl.contract.diagnostics import DiagnosticError, diagnose
from tests.bench_harness import CPU, PROMPTS, ROOT, SHAPE, bench, records
from tests.tiny import write_tiny_eagle3
from tests.tiny_manifest import tiny_manifest, write_manifest


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "ids.json"
    path.write_text(json.dumps({"ids": PROMPTS}))
    return path


def test_the_oracle_aims_at_an_accept_length(tiny_pair: Path, prompts: Path) -> None:
    engine = main.EngineOptions(device="cpu", proposer="oracle", num_speculative_tokens=4)
    every = bench(tiny_pair, engine, prompts=prompts, max_tokens=21, ignore_eos=True, repeats=1)
    assert every.points[0].accept_length == pytest.approx(5.0)
    assert every.settings.oracle_accept_length == 5.0
    given: dict[str, Any] = {
        "max_tokens": 80,
        "ignore_eos": True,
        "repeats": 1,
        "concurrency": (4,),
    }
    some = bench(tiny_pair, engine, prompts=prompts, accept_length=2.0, **given)
    assert some.points[0].accept_length == pytest.approx(2.0, abs=0.3)
    assert some.identical is not None
    assert some.identical.equal == 4


@pytest.mark.parametrize("is_on_host", [False, True])
def test_verification_is_timed_for_a_proposer_without_weights(
    tiny_pair: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, is_on_host: bool
) -> None:
    def on_host(_: Room, *, device: torch.device, max_ngram: int) -> NgramProposer:
        return NgramProposer(device=device, max_ngram=max_ngram)

    if is_on_host:
        monkeypatch.setattr("runtime.spec.factory.DeviceNgramProposer", on_host)
    engine = main.EngineOptions(device="cpu", proposer="ngram", num_speculative_tokens=2)
    given: dict[str, Any] = {"limit": 1, "max_tokens": 3, "repeats": 1, "step_samples": 1}
    (point,) = bench(tiny_pair, engine, prompts=prompts, **given).points
    target, own = [("decode", 1), ("verify", 3)], [("draft", 2), ("round", 3)]
    found = [(step.step, step.width) for step in point.steps]
    assert found == (target if is_on_host else target + own)
    assert point.verify_ratio is not None
    assert (point.other_s is None) == is_on_host


def test_an_arm_without_the_contract_is_measured_beside(tiny_target_only: Path) -> None:
    report = bench(
        tiny_target_only,
        prompt_tokens=(6,),
        concurrency=(3,),
        max_tokens=6,
        contract="off",
        step_samples=1,
    )
    (point,), (settings,) = report.points, report.settings.points
    assert settings.order == ["target-only", "contract-off", "contract-off", "target-only"]
    free = point.arm("contract-off")
    assert free is not None
    assert free.decode_tokens_per_s is not None
    plain = point.arms[0].decode_tokens_per_s
    assert plain is not None
    expected = 1 - plain.median / free.decode_tokens_per_s.median
    assert point.exactness_tax == pytest.approx(expected)
    assert point.contract_off is not None
    assert point.contract_off.total == 3
    assert point.identical is None
    (segments,) = set(point.contract_off_choices.values()) - {"library"}
    assert re.fullmatch(r"segments of \d+ keys", segments)
    assert [step.step for step in point.steps] == ["decode", "contract-off"]
    assert "exactness tax" in main.report_page(report)


def test_only_rounds_of_its_number_of_rows_leave_the_contract(tiny_target_only: Path) -> None:
    """Pinned choices, and other numbers of rows, give the bits of the layers as they are."""
    models = LLM.from_manifest(tiny_target_only, CPU.to_overrides()).models
    pinned = free_models(models, FreeChoices(num_rows=4, products={}))
    library = free_models(models, tune_products(models, 4))
    prompt = PROMPTS[0]
    expected = top_two_after(models.target, prompt, 16)
    assert top_two_after(pinned.target, prompt, 16) == expected
    assert top_two_after(library.target, [*prompt, 3], 16) == top_two_after(
        models.target, [*prompt, 3], 16
    )
    free = top_two_after(library.target, prompt, 16)
    assert free.top1_id == expected.top1_id
    assert free.margin == pytest.approx(expected.margin, rel=1e-3)


def test_forced_lengths_are_labelled_and_claim_nothing(tiny_pair: Path, prompts: Path) -> None:
    report = bench(
        tiny_pair,
        prompts=prompts,
        is_forced=True,
        accept_length=2.0,
        ignore_eos=True,
        max_tokens=60,
        repeats=1,
        concurrency=(4,),
    )
    assert report.settings.forced_accept_length == 2.0
    assert report.points[0].accept_length == pytest.approx(2.0, abs=0.4)
    assert report.identical is None
    assert report.is_equal
    assert report.unfit_for_quality is not None
    assert "unfit for judging quality" in main.report_page(report)


@pytest.mark.parametrize(("wanted", "num_drafts"), [(1.0, 3), (1.5, 4), (2.36, 4), (4.9, 4)])
def test_acceptance_for_solves_the_sum(wanted: float, num_drafts: int) -> None:
    chance = acceptance_for(wanted, num_drafts)
    assert sum(chance**power for power in range(num_drafts + 1)) == pytest.approx(wanted)
    assert acceptance_for(num_drafts + 1, num_drafts) == 1.0


@pytest.mark.parametrize(
    ("engine", "accept_length", "code"),
    [
        (CPU, 2.0, "SD832"),
        (main.EngineOptions(device="cpu", proposer="oracle"), 5.5, "SD832"),
        (main.EngineOptions(device="cpu", proposer="oracle"), 0.5, "SD832"),
    ],
)
def test_an_accept_length_that_cannot_be_is_refused(
    tiny_pair: Path, prompts: Path, engine: main.EngineOptions, accept_length: float, code: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        bench(tiny_pair, engine, prompts=prompts, accept_length=accept_length)
    assert caught.value.diagnostics[0].code == code


def test_random_weights_run_every_point(tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(SHAPE))
    engine = main.EngineOptions(device="cpu", proposer="oracle", num_speculative_tokens=3)
    report = bench(
        None, engine, shape=shape, prompt_tokens=(5, 9), concurrency=(1, 2), repeats=1, max_tokens=4
    )
    assert [(p.prompt_tokens, p.concurrency) for p in report.points] == [
        (5, 1), (5, 2), (9, 1), (9, 2)
    ]  # fmt: skip
    assert report.unfit_for_quality == "the target's weights are random"
    assert "unfit for judging quality" in main.report_page(report)
    assert report.identical is not None
    assert (report.identical.equal, report.identical.total) == (6, 6)
    sizes = report.settings.points[0]
    layers = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32 + 2 * 16 + 2 * 4)
    # the final norm is neither a layer's nor the head's
    assert sizes.weight_bytes == 4 * (layers + 90 * 16)
    assert sizes.kv_bytes_per_token == 2 * 2 * 2 * 4 * 4


def test_random_prompts_do_not_depend_on_how_many_there_are() -> None:
    few = random_prompts(2, num_tokens=6, num_ids=50, seed=1)
    many = random_prompts(5, num_tokens=6, num_ids=50, seed=1)
    assert few == many[:2]
    assert len({prompt.ids_target for prompt in many}) == 5
    assert few != random_prompts(2, num_tokens=6, num_ids=50, seed=2)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "qwen3-8b"])
def test_shapes_have_the_published_sizes(name: str) -> None:
    facts = shape_manifest(ROOT / "docs" / "benchmarks" / "shapes" / f"{name}.json")
    read = weight_bytes_per_step(facts, torch.bfloat16)
    expected = {"smollm2-135m": 269e6, "llama-3.2-1b": 2471e6, "qwen3-8b": 15136e6}[name]
    assert read == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "gpt2"}, "SD203"),
        ({"hidden_size": None}, "SD206"),
        ({"vocab_size": "many"}, "SD207"),
        ({"num_hidden_layers": 1.5}, "SD207"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "SD811"),
    ],
)
def test_a_config_that_cannot_be_a_target_is_refused(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | change))
    with pytest.raises(DiagnosticError) as caught:
        shape_manifest(path)
    assert caught.value.diagnostics[0].code == code
    path.write_text("[")
    with pytest.raises(DiagnosticError) as caught:
        shape_manifest(path)
    assert caught.value.diagnostics[0].code == "SD117"


def test_processes_end_when_loading_fails_after_they_started(
    tiny_pair: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[StagedModels] = []

    def fail(models: LoadedModels, config: RuntimeConfig) -> NoReturn:
        raise DiagnosticError(diagnose("SD830", where="probe", message="the device went away"))

    monkeypatch.setattr("runtime.bench.arms.invariance_problems", fail)
    monkeypatch.setattr(StagedModels, "close", lambda staged: closed.append(staged))
    with pytest.raises(DiagnosticError, match="SD830"):
        bench(tiny_pair, CPU, prompts=prompts)
    assert len(closed) == 1


def test_a_reduced_head_stands_in_the_settings(
    tiny_pair: Path, prompts: Path, tmp_path: Path
) -> None:
    """What a draft reaches with a map is not what its full head reaches."""
    target = tiny_pair.parent / "target"
    draft = write_tiny_eagle3(
        tmp_path / "draft", target, draft_vocab_size=None, boundary_ids=(0, 1, 2)
    )
    full = write_manifest(tmp_path, tiny_manifest(target, draft))
    ngram = main.EngineOptions(device="cpu", proposer="ngram")
    found = []
    for manifest, engine in ((tiny_pair, CPU), (full, CPU), (tiny_pair, ngram)):
        raw = records(manifest, engine, prompts=prompts, limit=1, max_tokens=3, repeats=1)
        found.append(msgspec.json.decode(msgspec.json.encode(raw.settings)))
    assert found[0]["draft_vocab_size"] == 64
    assert all("draft_vocab_size" not in settings for settings in found[1:])
