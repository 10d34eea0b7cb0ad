"""`specctl bench` on CUDA: captured steps, forced lengths, and the arm without the contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import main
from runtime.bench.raw import StepRecord
from tests.bench_harness import ROOT, records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = main.EngineOptions(device="cuda", dtype="bfloat16")
SHAPE = ROOT / "docs" / "benchmarks" / "shapes" / "smollm2-135m.json"


def small(proposer: str, **settings: Any) -> main.RawBench:
    engine = replace(CUDA, proposer=proposer, num_speculative_tokens=7)
    given = {"shape": SHAPE, "prompt_tokens": (128,), "max_tokens": 48, "step_samples": 5}
    return records(None, engine, **(given | settings))


def test_an_oracle_on_random_weights_is_exact_and_its_steps_are_graphs() -> None:
    raw = small("oracle", accept_length=3.0, concurrency=(1, 8))
    report = main.summarise(raw)
    assert report.identical is not None
    assert (report.identical.equal, report.identical.total) == (9, 9)
    steps = [record for record in raw.records if isinstance(record, StepRecord)]
    assert {(step.point, step.step) for step in steps} == {
        (point, step) for point in (0, 1) for step in ("decode", "verify", "draft", "round")
    }
    assert {step.clock for step in steps} == {"cuda-events"}
    assert all(value > 0 for step in steps for value in step.samples_s)
    for point in report.points:
        assert all(arm.device_rounds > 0 and arm.graphs > 0 for arm in point.arms)
        shares = [step.share_of_copy for step in point.steps if step.share_of_copy is not None]
        # Weights are read at most as fast as a copy moves bytes, up to what caches add.
        assert all(0 < share < 1.5 for share in shares)


def test_forced_lengths_follow_their_schedule_in_captured_rounds() -> None:
    report = main.summarise(
        small("oracle", accept_length=4.0, is_forced=True, concurrency=(8,), max_tokens=120)
    )
    assert report.identical is None
    assert report.points[0].accept_length == pytest.approx(4.0, abs=0.5)


def test_the_fastest_kernels_are_chosen_and_measured() -> None:
    report = main.summarise(small("none", contract="off", concurrency=(8,)))
    (point,) = report.points
    assert point.exactness_tax is not None
    assert len(point.contract_off_choices) == 5
    assert {step.step for step in point.steps} == {"decode", "contract-off"}


def test_a_directory_gives_the_same_report(tmp_path: Path) -> None:
    raw = small("none")
    main.write_raw(tmp_path, raw)
    assert main.report_page(main.summarise(main.read_raw(tmp_path))) == main.report_page(
        main.summarise(raw)
    )
