"""Arms, comparison, report and its schema, on a tiny pair."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch

from runtime import main
from runtime.bench.arms import idle_steps
from runtime.bench.compare import compare_runs, first_difference
from runtime.bench.environment import source_digests
from runtime.bench.margin import TopTwo, top_two_after
from runtime.bench.prompts import BenchPrompt
from runtime.bench.raw import RequestRecord
from runtime.bench.reference import compare_reference
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.diagnostics import DiagnosticError
from tests.bench_harness import CPU, PROMPTS, QUESTIONS, ROOT, bench, records, requests_of

SCHEMA = ROOT / "docs" / "reference" / "schemas" / "bench.schema.json"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "ids.json"
    path.write_text(json.dumps({"ids": PROMPTS}))
    return path


@pytest.fixture(scope="module")
def raw(tiny_pair: Path, prompts: Path) -> main.RawBench:
    return records(tiny_pair, prompts=prompts, concurrency=(2,), step_samples=2)


@pytest.fixture(scope="module")
def report(raw: main.RawBench) -> main.BenchReport:
    return main.summarise(raw)


def test_report_follows_the_published_schema(report: main.BenchReport) -> None:
    published = json.loads(SCHEMA.read_text())
    assert published == main.bench_json_schema(), "run `python docs/_generate.py`"
    jsonschema.Draft202012Validator.check_schema(published)
    document = json.loads(msgspec.json.encode(report))
    jsonschema.validate(document, published)
    assert document["report_version"] == 2
    assert {"points", "identical", "environment", "copy"} <= set(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, published)


@pytest.mark.parametrize(
    ("given", "has_processes", "codes"),
    [(3, True, ["SD805"]), (3, False, []), (0, True, []), (None, True, [])],
)
def test_samples_of_steps_that_nobody_takes_are_said(
    given: int | None, has_processes: bool, codes: list[str]
) -> None:
    found = idle_steps(main.BenchSettings(step_samples=given), has_processes=has_processes)
    assert [item.code for item in found] == codes
    assert all((item.where, item.found) == ("--step-samples", "3") for item in found)


def test_arms_alternate_and_their_sums_hold(raw: main.RawBench, report: main.BenchReport) -> None:
    (point,), (settings,) = report.points, report.settings.points
    assert settings.order == ["target-only", "speculative", "speculative", "target-only"]
    target_only, speculative = point.arms
    assert (target_only.name, speculative.name) == ("target-only", "speculative")
    assert (target_only.proposer, speculative.proposer) == ("none", "eagle3")
    for arm in point.arms:
        first = [r for r in requests_of(raw) if r.arm == arm.name and r.run == arm.runs[0].order]
        assert arm.tokens == sum(len(record.ids) for record in first)
        assert [run.tokens for run in arm.runs] == [arm.tokens, arm.tokens]
        assert arm.rounds == sum(record.rounds for record in first)
        assert arm.proposed_drafts == sum(record.proposed_drafts for record in first)
        assert arm.accepted_drafts == sum(record.accepted_drafts for record in first)
        assert arm.tokens_per_s_range.min <= arm.tokens_per_s <= arm.tokens_per_s_range.max
        assert arm.ttft_s.min > 0
        assert arm.itl_s is not None
    assert target_only.accept_length is None
    assert target_only.proposed_drafts == 0
    assert len(requests_of(raw)) == 4 * len(PROMPTS)


def test_every_token_has_its_arrival(raw: main.RawBench) -> None:
    for record in requests_of(raw):
        assert sum(count for _, count in record.arrivals) == len(record.ids)
        times = [record.submitted_s, *(at for at, _ in record.arrivals)]
        assert times == sorted(times)


def test_accept_length_and_positions_agree(report: main.BenchReport) -> None:
    (point,) = report.points
    speculative = point.arm("speculative")
    assert speculative is not None
    expected = 1 + speculative.accepted_drafts / speculative.rounds
    assert point.accept_length == pytest.approx(expected)
    assert speculative.accepted_per_round == pytest.approx(expected - 1)
    assert len(point.acceptance_per_position) == 4
    assert sum(point.acceptance_per_position) == pytest.approx(expected - 1)
    histogram = speculative.rounds_by_accepted
    assert sum(histogram) == speculative.rounds
    assert sum(i * count for i, count in enumerate(histogram)) == speculative.accepted_drafts


def test_both_arms_give_the_same_tokens(report: main.BenchReport) -> None:
    (point,) = report.points
    for found in (point.repeat, point.identical, report.identical):
        assert found is not None
        assert (found.equal, found.total) == (4, 4)
        assert found.first_divergence is None
    assert report.is_equal


def test_steps_and_copy_are_measured(report: main.BenchReport) -> None:
    (point,) = report.points
    steps = {step.step: step for step in point.steps}
    assert set(steps) == {"decode", "verify", "draft", "round"}
    assert (steps["decode"].width, steps["verify"].width, steps["draft"].width) == (1, 5, 4)
    assert {step.clock for step in point.steps} == {"wall"}
    decode = steps["decode"]
    settings = report.settings.points[0]
    cache = 2 * settings.context * settings.kv_bytes_per_token
    assert decode.bytes == settings.weight_bytes + cache
    # 2 layers of keys and values, 2 heads of 8 float32 numbers
    assert settings.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert report.copy is not None
    assert decode.share_of_copy == pytest.approx((decode.gb_per_s or 0) / report.copy.gb_per_s)
    assert point.verify_ratio is not None
    assert point.other_s is not None


def test_a_directory_gives_the_same_report(raw: main.RawBench, tmp_path: Path) -> None:
    main.write_raw(tmp_path, raw)
    again = main.summarise(main.read_raw(tmp_path))
    assert msgspec.json.encode(again) == msgspec.json.encode(main.summarise(raw))
    assert main.report_page(again) == main.report_page(main.summarise(raw))


def _damage(name: str, lines: list[str]) -> list[str] | None:
    """Return records that are not those of one whole benchmark; None: the file is gone."""
    run = next(n for n, line in enumerate(lines) if '"kind":"run"' in line)
    request = next(n for n, line in enumerate(lines) if '"kind":"request"' in line)
    step = next(n for n, line in enumerate(lines) if '"kind":"step"' in line)
    samples = re.sub(r'"samples_s":\[[^]]*\]', '"samples_s":[]', lines[step])
    return {
        "gone": None,
        "empty": [],
        "other kind": [*lines, '{"kind":"mystery"}'],
        "cut off": [*lines[:-1], lines[-1][:40]],
        "twice": lines + lines,
        "without a run": lines[:run] + lines[run + 1 :],
        "without a request": [line for line in lines if '"kind":"request"' not in line],
        "another point": [line.replace('"point":0', '"point":7') for line in lines],
        "no samples": [*lines[:step], samples, *lines[step + 1 :]],
        "no arrivals": [
            *lines[:request],
            re.sub(r'"arrivals":\[.*\]', '"arrivals":[]', lines[request]),
            *lines[request + 1 :],
        ],
        "no time": [re.sub(r'"seconds":[0-9.e-]+', '"seconds":0.0', line) for line in lines],
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "gone",
        "empty",
        "other kind",
        "cut off",
        "twice",
        "without a run",
        "without a request",
        "another point",
        "no samples",
        "no arrivals",
        "no time",
    ],
)
def test_damaged_records_are_refused(raw: main.RawBench, tmp_path: Path, name: str) -> None:
    main.write_raw(tmp_path, raw)
    path = tmp_path / "records.jsonl"
    lines = _damage(name, path.read_text("utf-8").splitlines())
    path.unlink()
    if lines is not None:
        path.write_text("\n".join(lines), "utf-8")
    with pytest.raises(DiagnosticError) as caught:
        main.read_raw(tmp_path)
    (found,) = caught.value.diagnostics
    assert found.code == "SD925"
    assert str(path) in found.where


def test_the_page_needs_nothing_else(report: main.BenchReport) -> None:
    page = main.report_page(report)
    assert page.count("<svg") == 4
    assert not any(mark in page for mark in ("<script", "http:", "https:", "src=", "@import"))
    assert "unfit" not in page.split("</style>")[1]
    assert report.environment.sources_digest in page


def test_sources_are_digested_by_content(tmp_path: Path, report: main.BenchReport) -> None:
    assert set(report.environment.sources) == {"engine", "graphs", "kernels", "models", "spec"}
    for name in report.environment.sources:
        (tmp_path / name).mkdir()
    (tmp_path / "engine" / "a.py").write_text("1")
    first = source_digests(tmp_path)
    assert first == source_digests(tmp_path)
    (tmp_path / "engine" / "a.py").rename(tmp_path / "engine" / "b.py")
    second = source_digests(tmp_path)
    assert first["engine"] != second["engine"]
    assert first["graphs"] == second["graphs"]


def test_equality_rests_on_a_repeat_of_target_only(raw: main.RawBench) -> None:
    """An engine that does not repeat itself has no claim that a draft could keep or break."""
    broken = [
        msgspec.structs.replace(record, ids=[*record.ids[:-1], 1 + record.ids[-1]])
        if isinstance(record, RequestRecord) and record.run == 3
        else record
        for record in raw.records
    ]
    report = main.summarise(msgspec.structs.replace(raw, records=broken))
    (point,) = report.points
    assert point.repeat is not None
    assert point.repeat.equal == 0
    assert (point.identical, report.identical) == (None, None)
    assert not report.is_equal


def test_one_run_of_each_arm_still_repeats_target_only(tiny_pair: Path, prompts: Path) -> None:
    report = bench(tiny_pair, prompts=prompts, repeats=1, limit=1, max_tokens=3)
    assert report.settings.points[0].order == ["target-only", "speculative", "target-only"]
    assert report.points[0].repeat is not None


def test_sampling_is_identical_too(tiny_pair: Path, prompts: Path) -> None:
    raw = records(tiny_pair, prompts=prompts, temperature=1.0, seed=3, max_tokens=6)
    sampled = main.summarise(raw)
    assert sampled.identical is not None
    assert sampled.identical.equal == 4
    plain = records(tiny_pair, prompts=prompts, max_tokens=6, limit=2)
    assert plain.settings.num_prompts == 2
    assert requests_of(plain)[0].ids != requests_of(raw)[0].ids


def test_filters_cut_the_law_and_stand_in_the_report(tiny_pair: Path, prompts: Path) -> None:
    def drawn(**filters: float) -> main.RawBench:
        given = {"temperature": 1.0, "seed": 3, "max_tokens": 6} | filters
        return records(tiny_pair, prompts=prompts, repeats=1, **given)

    greedy, plain, least = drawn(temperature=0.0), drawn(), drawn(top_k=1)
    answers = [[record.ids for record in requests_of(raw)] for raw in (greedy, plain, least)]
    assert answers[0] == answers[2] != answers[1]
    cut = drawn(top_p=0.5, min_p=0.125)
    report = main.summarise(cut)
    assert report.identical is not None
    assert report.identical.equal == 4
    assert cut.settings.law == "temperature 1, top-p 0.5, min-p 0.125"
    assert cut.settings.law in main.report_page(report)
    assert plain.settings.law == "temperature 1"
    assert "filters" not in msgspec.json.decode(msgspec.json.encode(plain.settings))


def test_gamma_and_proposer_are_used(tiny_pair: Path, prompts: Path) -> None:
    engine = main.EngineOptions(device="cpu", proposer="ngram", num_speculative_tokens=2)
    (point,) = bench(tiny_pair, engine, prompts=prompts, limit=1).points
    assert point.arms[1].proposer == "ngram"
    assert point.arms[1].num_speculative_tokens == 2
    assert len(point.acceptance_per_position) == 2


def test_a_target_alone_has_one_arm(tiny_target_only: Path, prompts: Path) -> None:
    (point,) = bench(tiny_target_only, prompts=prompts, limit=1, max_tokens=3).points
    assert [arm.name for arm in point.arms] == ["target-only"]
    assert (point.identical, point.speedup, point.accept_length) == (None, None, None)
    assert point.repeat is not None
    assert point.repeat.equal == 1


def test_both_turns_are_asked_and_reuse_the_prefix(tiny_pair: Path) -> None:
    raw = records(tiny_pair, prompts=QUESTIONS, turns="both", limit=3, max_tokens=6, repeats=1)
    first_run = [record for record in requests_of(raw) if record.run == 0]
    assert [(r.prompt, r.turn) for r in first_run] == [(p, t) for p in range(3) for t in (1, 2)]
    for first, second in zip(first_run[::2], first_run[1::2], strict=True):
        assert second.prompt_tokens > first.prompt_tokens
        assert first.cached_tokens == 0
        assert second.cached_tokens > 0
    report = main.summarise(raw)
    assert report.settings.points[0].num_requests == 6
    assert report.identical is not None
    assert (report.identical.equal, report.identical.total) == (6, 6)
    assert report.points[0].arms[0].cached_tokens > 0


def test_reference_differences_show_the_margin(
    tiny_pair: Path, prompts: Path, raw: main.RawBench, tmp_path: Path
) -> None:
    answers = [record.ids for record in requests_of(raw)[:4]]
    changed = [list(ids) for ids in answers]
    changed[2][5] = (changed[2][5] + 1) % 90
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({"f32": changed}))
    found = bench(tiny_pair, prompts=prompts, reference=path, repeats=1).reference
    assert found is not None
    assert (found.equal, found.total) == (3, 4)
    (difference,) = found.differences
    assert (difference.prompt, difference.position) == (2, 5)
    assert difference.found_id == difference.top1_id == answers[2][5]
    assert difference.reference_id == changed[2][5]
    assert difference.margin > 0
    shorter = bench(tiny_pair, prompts=prompts, reference=path, max_tokens=5, repeats=1).reference
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
    assert target.head is not None
    ones = replace(target.head, weight_RD=torch.ones_like(target.head_VD))
    level = replace(target, head=ones)
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


def test_first_divergence_names_prompt_position_and_ids(raw: main.RawBench) -> None:
    base = requests_of(raw)[:3]
    changed = [
        msgspec.structs.replace(base[1], ids=[*base[1].ids[:1], 95, 96]),
        msgspec.structs.replace(base[2], ids=[*base[2].ids, 7]),
    ]
    found = compare_runs(base, [[base[0], *changed]])
    assert (found.equal, found.total) == (1, 3)
    first = found.first_divergence
    assert first is not None
    assert (first.prompt, first.turn, first.position) == (base[1].prompt, 1, 1)
    assert (first.target_only_id, first.speculative_id) == (base[1].ids[1], 95)
