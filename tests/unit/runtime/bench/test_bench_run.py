"""Arms, comparison, report and its schema, on a tiny pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from runtime import main
from runtime.bench.compare import compare_arms, compare_reference, first_difference
from runtime.bench.margin import TopTwo, top_two_after
from runtime.bench.prompts import BenchPrompt
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.diagnostics import DiagnosticError

ROOT = Path(__file__).parents[4]
SCHEMA = ROOT / "docs" / "reference" / "schemas" / "bench.schema.json"
CPU = main.EngineOptions(device="cpu")
PROMPTS = [[5, 6, 7, 8], [40, 41], [90, 3, 3, 17, 20], [33] * 9]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "ids.json"
    path.write_text(json.dumps({"ids": PROMPTS}))
    return path


def bench(manifest: Path, engine: main.EngineOptions = CPU, **settings: Any) -> main.BenchReport:
    return main.bench(
        manifest,
        engine,
        main.BenchSettings(**({"max_tokens": 12} | settings)),
        on_progress=lambda label, done, total: None,
        on_diagnostic=lambda diagnostic: None,
    )


@pytest.fixture(scope="module")
def report(tiny_pair: Path, prompts: Path) -> main.BenchReport:
    return bench(tiny_pair, prompts=prompts, repeats=2, concurrency=2)


def test_report_follows_the_published_schema(report: main.BenchReport) -> None:
    published = json.loads(SCHEMA.read_text())
    assert published == main.bench_json_schema(), "run `python docs/_generate.py`"
    jsonschema.Draft202012Validator.check_schema(published)
    document = json.loads(msgspec.json.encode(report))
    jsonschema.validate(document, published)
    assert {"arms", "accept_length", "acceptance_per_position", "identical", "environment"} <= set(
        document
    )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, published)


def test_arms_alternate_and_their_sums_hold(report: main.BenchReport) -> None:
    assert report.settings.order == ["target-only", "speculative", "speculative", "target-only"]
    target_only, speculative = report.arms
    assert (target_only.name, speculative.name) == ("target-only", "speculative")
    assert (target_only.proposer, speculative.proposer) == ("none", "eagle3")
    for arm in report.arms:
        records = [record for record in report.requests if record.arm == arm.name]
        assert arm.tokens == sum(len(record.ids) for record in records)
        assert arm.tokens == sum(run.tokens for run in arm.runs)
        first = [record for record in records if record.run == arm.runs[0].order]
        assert arm.rounds == sum(record.rounds for record in first)
        assert arm.proposed_drafts == sum(record.proposed_drafts for record in first)
        assert arm.accepted_drafts == sum(record.accepted_drafts for record in first)
    assert target_only.accept_length is None
    assert target_only.proposed_drafts == 0
    assert len(report.requests) == 4 * len(PROMPTS)


def test_accept_length_and_positions_agree(report: main.BenchReport) -> None:
    speculative = report.arm("speculative")
    assert speculative is not None
    expected = 1 + speculative.accepted_drafts / speculative.rounds
    assert report.accept_length == pytest.approx(expected)
    assert len(report.acceptance_per_position) == 4
    assert sum(report.acceptance_per_position) == pytest.approx(expected - 1)


def test_both_arms_give_the_same_tokens(report: main.BenchReport) -> None:
    assert report.identical is not None
    assert (report.identical.equal, report.identical.total) == (4, 4)
    assert report.identical.first_divergence is None


def test_sampling_is_identical_too(tiny_pair: Path, prompts: Path) -> None:
    sampled = bench(tiny_pair, prompts=prompts, temperature=1.0, seed=3, max_tokens=6)
    assert sampled.identical is not None
    assert sampled.identical.equal == 4
    greedy = bench(tiny_pair, prompts=prompts, max_tokens=6, limit=2)
    assert greedy.settings.num_prompts == 2
    assert greedy.requests[0].ids != sampled.requests[0].ids


def test_gamma_and_proposer_are_used(tiny_pair: Path, prompts: Path) -> None:
    engine = main.EngineOptions(device="cpu", proposer="ngram", num_speculative_tokens=2)
    report = bench(tiny_pair, engine, prompts=prompts, limit=1)
    assert report.arms[1].proposer == "ngram"
    assert report.arms[1].num_speculative_tokens == 2
    assert len(report.acceptance_per_position) == 2


def test_a_target_alone_has_one_arm(tiny_target_only: Path, prompts: Path) -> None:
    report = bench(tiny_target_only, prompts=prompts, limit=1, max_tokens=3)
    assert [arm.name for arm in report.arms] == ["target-only"]
    assert report.identical is report.speedup is report.accept_length is None


def test_reference_differences_show_the_margin(
    tiny_pair: Path, prompts: Path, report: main.BenchReport, tmp_path: Path
) -> None:
    answers = [record.ids for record in report.requests[:4]]
    changed = [list(ids) for ids in answers]
    changed[2][5] = (changed[2][5] + 1) % 90
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"f32": changed}))
    found = bench(tiny_pair, prompts=prompts, reference=path).reference
    assert found is not None
    assert (found.equal, found.total) == (3, 4)
    (difference,) = found.differences
    assert (difference.prompt, difference.position) == (2, 5)
    assert difference.found_id == difference.top1_id == answers[2][5]
    assert difference.reference_id == changed[2][5]
    assert difference.margin > 0
    shorter = bench(tiny_pair, prompts=prompts, reference=path, max_tokens=5).reference
    assert shorter is not None
    assert shorter.equal == 4


def test_too_few_references_are_refused(tmp_path: Path) -> None:
    prompts = [BenchPrompt(name="0", ids_target=(5,)), BenchPrompt(name="1", ids_target=(6,))]
    with pytest.raises(DiagnosticError) as caught:
        compare_reference(
            tmp_path / "r.json",
            [(1,)],
            [(1,), (2,)],
            prompts,
            max_tokens=4,
            top_two=lambda ids: TopTwo(top1_id=0, top2_id=1, margin=1.0),
        )
    assert caught.value.diagnostics[0].code == "SD922"


def test_a_prompt_that_does_not_fit_is_refused(tiny_pair: Path, prompts: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        bench(tiny_pair, prompts=prompts, max_tokens=600)
    assert caught.value.diagnostics[0].code == "SD909"


def test_top_two_agrees_with_the_engine(tiny_pair: Path) -> None:
    llm = LLM.from_manifest(tiny_pair, CPU.to_overrides())
    (answer,) = llm.generate(
        [RequestInput(request_id="a", prompt_ids_target=PROMPTS[0], max_tokens=6)]
    )
    for count, token in enumerate(answer.ids_target):
        ids = (*PROMPTS[0], *answer.ids_target[:count])
        assert top_two_after(llm.models.target, ids, 16).top1_id == token


def test_top_two_takes_the_lowest_ids_of_a_tie(tiny_pair: Path) -> None:
    target = LLM.from_manifest(tiny_pair, CPU.to_overrides()).models.target
    level = replace(target, head_VD=torch.ones_like(target.head_VD))
    assert top_two_after(level, PROMPTS[0], 16) == TopTwo(top1_id=0, top2_id=1, margin=0.0)


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None)],
)
def test_first_difference(
    left: tuple[int, ...], right: tuple[int, ...], position: int | None
) -> None:
    assert first_difference(left, right) == position
    assert first_difference(right, left) == position


def test_first_divergence_names_prompt_position_and_ids() -> None:
    base = [(1, 2, 3), (4, 5), (6,)]
    found = compare_arms([base], [[(1, 2, 3), (4, 9), (6, 7)]])
    assert (found.equal, found.total) == (1, 3)
    first = found.first_divergence
    assert first is not None
    assert (first.prompt, first.position, first.target_only_id, first.speculative_id) == (
        1,
        1,
        5,
        9,
    )
    longer = compare_arms([[(6,)]], [[(6, 7)]]).first_divergence
    assert longer is not None
    assert (longer.target_only_id, longer.speculative_id) == (None, 7)
