"""The cases that GPUs run, on the CPU: the same processes with gloo and POSIX shared memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel_cases import (
    Answers,
    answers_of,
    emulated_ranks,
    lost_rank,
    prefilled_elsewhere,
    small,
    write_qwen3,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
SMALL = small("cpu")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(manifest: Path) -> Answers:
    """What one process answers, with and without its draft."""
    found = answers_of(manifest, SMALL)
    assert answers_of(manifest, replace(SMALL, proposer="none")).ids == found.ids
    assert found.num_accepted_drafts > 0
    return found


def test_two_stages_as_processes(manifest: Path, alone: Answers) -> None:
    overrides = replace(SMALL, pipeline_parallel=2, stages_in_process=False)
    assert answers_of(manifest, overrides) == replace(alone, transport="gloo")


def test_two_ranks_as_processes(manifest: Path) -> None:
    expected = emulated_ranks(manifest, SMALL, 2)
    found = answers_of(manifest, replace(SMALL, tensor_parallel=2))
    assert found == replace(expected, transport="gloo")


def test_a_prefill_process_and_a_decode_process(manifest: Path, alone: Answers) -> None:
    assert prefilled_elsewhere(manifest, "cpu") == alone


@pytest.mark.parametrize("layout", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_a_killed_rank_is_lost_long_before_its_time_limit(manifest: Path, layout: str) -> None:
    said = lost_rank(manifest, "cpu", layout, "SIGKILL", rank_timeout_s=14400, within_s=500)
    assert said == "SD855 SD855 gloo child-is-over=True"
