"""What an arm ran before it is timed, and what a benchmark that was cut has kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime import main
from runtime.bench import run as run_module
from runtime.bench.drive import RunPlace, Workload, run_arm
from runtime.bench.points import Point
from runtime.bench.prompts import BenchPrompt
from runtime.bench.raw import RunRecord
from runtime.bench.settings import WARM_UP, BenchSettings
from specctl.cli.app import run
from tests.bench_harness import PROMPTS, records
from tests.engine_harness import prompt_of
from tests.fake_graph import make_agreeing_world, make_llm


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "ids.json"
    path.write_text(json.dumps({"ids": PROMPTS}))
    return path


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_a_timed_run_replays_no_graph_for_the_first_time(tmp_path: Path, proposer: str) -> None:
    """Prompts of several sizes, contexts that grow, batches that shrink at the end."""
    gamma = 0 if proposer == "none" else 3
    llm, (graph,) = make_llm(
        make_agreeing_world(tmp_path), proposer=proposer, num_speculative_tokens=gamma
    )
    lengths = (5, 30, 9, 17, 38)
    workload = Workload(
        prompts=[
            BenchPrompt(name=str(seed), ids_target=tuple(prompt_of(seed, length)))
            for seed, length in enumerate(lengths)
        ],
        concurrency=3,
        encoder=None,
    )
    marks: dict[str, tuple[int, int]] = {}

    def on_progress(label: str, done: int, total: int) -> None:
        if done == 0:
            assert total == len(lengths)
            marks[label] = (len(graph.shapes), len(graph.prefills))

    settings = BenchSettings(max_tokens=40, ignore_eos=True)
    place = RunPlace(point=0, arm="target-only", order=0)
    outcome = run_arm(llm, place, workload, settings, on_progress, is_first=True)
    rounds, prompts_run = marks["target-only"]
    assert marks["target-only, warm-up"] == (0, 0) < (rounds, prompts_run)
    assert len(set(graph.shapes)) > 4
    assert {*graph.shapes[rounds:]} == {*graph.shapes[:rounds]}
    timed = [shape for shape, _, _ in graph.prefills[prompts_run:]]
    assert {*timed} == {shape for shape, _, _ in graph.prefills[:prompts_run]}
    assert [len(record.ids) for record in outcome.requests] == [40] * len(lengths)
    assert all(record.cached_tokens == 0 for record in outcome.requests)

    num_rounds = len(graph.shapes)
    again = run_arm(llm, place, workload, settings, on_progress, is_first=False)
    assert [record.ids for record in again.requests] == [item.ids for item in outcome.requests]
    assert again.run.rounds == outcome.run.rounds
    short = marks["target-only"][0] - num_rounds
    assert 0 < short < (len(graph.shapes) - num_rounds) / 2
    assert outcome.run.warm_up_s > 0 < again.run.warm_up_s


def test_a_report_says_how_arms_were_warmed_up(tiny_pair: Path, prompts: Path) -> None:
    raw = records(tiny_pair, prompts=prompts, limit=1, max_tokens=3)
    report = main.summarise(raw)
    assert report.settings.warm_up == WARM_UP
    runs = {record.order: record for record in raw.records if isinstance(record, RunRecord)}
    for arm in report.points[0].arms:
        assert arm.warm_up_s == pytest.approx(sum(runs[one.order].warm_up_s for one in arm.runs))
        assert arm.warm_up_s > 0
    assert WARM_UP in main.report_page(report)


def test_a_run_that_is_cut_keeps_the_points_that_ended(
    tiny_pair: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "cut", run_module._measure

    def measure(loaded: object, point: Point, *args: object) -> object:
        if point.index == 2:
            raise KeyboardInterrupt
        return whole(loaded, point, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "_measure", measure)
    options = ["--device", "cpu", "--max-tokens", "4", "--step-samples", "1", "--repeats", "1"]
    command = ["bench", str(tiny_pair), "--prompts", str(prompts), "--concurrency", "1,2,4"]
    assert run([*command, *options, "--output", str(out)]) != 0
    kept = main.read_raw(out)
    assert [point.concurrency for point in kept.settings.points] == [1, 2]
    assert not list(out.glob("*.part"))
    reports = []
    for _ in range(2):
        assert run(["bench", "--reanalyze", str(out)]) == 0
        reports.append([(out / name).read_bytes() for name in ("summary.json", "report.html")])
    assert reports[0] == reports[1]
    assert len(json.loads(reports[0][0])["points"]) == 2


def test_points_are_told_as_they_end_and_what_is_told_last_is_the_start_of_the_whole(
    tiny_pair: Path, prompts: Path
) -> None:
    told: list[main.RawBench] = []
    raw = records(
        tiny_pair, prompts=prompts, concurrency=(1, 2), max_tokens=3, limit=2, on_point=told.append
    )
    assert [len(item.settings.points) for item in told] == [1, 2]
    assert told[1] == raw
    assert raw.records[: len(told[0].records)] == told[0].records


def test_records_are_written_before_the_settings_that_name_them(
    tiny_pair: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut between two files leaves records that can be read."""
    told: list[main.RawBench] = []
    records(
        tiny_pair, prompts=prompts, concurrency=(1, 2), max_tokens=3, limit=2, on_point=told.append
    )
    main.write_raw(tmp_path, told[0])
    replace, num_files = Path.replace, 0

    def cut(path: Path, target: Path) -> Path:
        nonlocal num_files
        num_files += 1
        if num_files > 1:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        main.write_raw(tmp_path, told[1])
    assert main.summarise(main.read_raw(tmp_path)) == main.summarise(told[0])
