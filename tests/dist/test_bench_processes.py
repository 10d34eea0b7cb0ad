"""`specctl bench` over stages and ranks that are processes: both arms, equal, nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.cli.app import run
from tests.parallel_cases import write_qwen3

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("bench-qwen3"))


@pytest.mark.slow
def test_two_points_over_two_stages_of_two_ranks(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines of the first point are given up on every process before the second one's come."""
    options = ["--prompt-tokens", "9,17", "--max-tokens", "6", "--device", "cpu", "--json"]
    layout = ["--pp", "2", "--tp", "2", "--pp-processes"]
    more = ["--step-samples", "3", "--rank-timeout-s", "60"]
    assert run(["bench", str(manifest), *options, *layout, *more]) == 0, "the arms' answers differ"
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert said.err.count("SD805 warning") == 1
    assert "`step_samples` has no effect" in said.err
    spread = "2 stages of 2 ranks (draft over 2) (3+1 layers) in processes over gloo"
    assert report["settings"]["layout"].startswith(spread)
    assert len(report["points"]) == 2
    for point in report["points"]:
        assert [arm["name"] for arm in point["arms"]] == ["target-only", "speculative"]
        assert point["steps"] == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--force-accept-length", "2"], "schedule of lengths"),
        (["--contract", "off"], "without the contract"),
    ],
)
def test_what_other_processes_cannot_do_is_refused_before_they_start(
    manifest: Path, capsys: pytest.CaptureFixture[str], more: list[str], reason: str
) -> None:
    options = ["--prompt-tokens", "9", "--max-tokens", "6", "--device", "cpu", "--tp", "2"]
    assert run(["bench", str(manifest), *options, *more]) == 1
    error = capsys.readouterr().err
    assert "SD832" in error
    assert reason in " ".join(error.split())
