"""The marks of docs/benchmarks see the end of a prefill, whether it was captured or not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests.engine_harness import prompt_of
from tests.fake_graph import make_agreeing_world, make_llm

SCRIPT = Path(__file__).parents[4] / "docs" / "benchmarks" / "pd_pair.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pd_pair", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pd_pair", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("params", "is_captured"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.7, seed=3), True),
        (SamplingParams(repetition_penalty=1.2), False),
    ],
    ids=["greedy", "sampled", "penalty"],
)
def test_a_prefill_ends_before_the_first_round_starts(
    tmp_path: Path, script: ModuleType, params: SamplingParams, is_captured: bool
) -> None:
    """Prefills of requests with penalties are eager."""
    llm, (graph,) = make_llm(
        make_agreeing_world(tmp_path), proposer="eagle3", num_speculative_tokens=3
    )
    marks = script.Marks(device=llm.config.device)
    marks.watch(llm)
    marks.reset()
    request = RequestInput(
        request_id="a",
        prompt_ids_target=prompt_of(1, 9),
        params=params,
        max_tokens=9,
        ignore_eos=True,
    )
    llm.generate([request])
    assert bool(graph.prefills) == is_captured
    assert marks.prefilled is not None
    assert marks.decoding is not None
    assert marks.base.host_s < marks.prefilled.host_s < marks.decoding.host_s
