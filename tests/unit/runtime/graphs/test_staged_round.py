"""Stages in one process inside rounds on the device: hand-offs are part of the round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides, resolve_config
from runtime.engine.request import RequestInput
from runtime.engine.staged import load_staged
from runtime.models import StagedTarget
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from tests.engine_harness import World, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world, make_llm

REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 2 + 6 * index),
        params=SamplingParams(temperature=0.9 * (index == 1), seed=index),
        max_tokens=12 + index,
        ignore_eos=True,
    )
    for index in range(3)
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_agreeing_world(tmp_path_factory.mktemp("staged"))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_rounds_over_stages_in_one_process_change_no_token(world: World, num_stages: int) -> None:
    plain, _ = make_llm(world, is_eager=True, proposer="none")
    config = resolve_config(
        world.manifest,
        Overrides(device="cpu", pipeline_parallel=num_stages, stages_in_process=True),
    )
    assert (config.stage_mode, config.graphs) == ("in-process", "auto")
    staged = load_staged(Path("/manifest.yaml"), world.manifest, config)
    assert isinstance(staged.models.target, StagedTarget)
    assert [stage.num_layers for stage in staged.models.target.stages] == list(config.stage_layers)
    llm, (graph,) = make_llm(
        replace(world, models=staged.models), proposer="eagle3", num_speculative_tokens=3
    )
    assert ids_of(llm.generate(REQUESTS)) == ids_of(plain.generate(REQUESTS))
    stats = llm.engine.stats()
    assert 0 < stats.num_device_rounds <= len(graph.shapes)  # one may be unread at the end
    assert stats.num_accepted_drafts > 0


def test_a_hand_off_is_a_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage hands over may be written by it again: the next one has its own tensors."""
    config = resolve_config(
        world.manifest, Overrides(device="cpu", pipeline_parallel=2, stages_in_process=True)
    )
    target = load_staged(Path("/manifest.yaml"), world.manifest, config).models.target
    assert isinstance(target, StagedTarget)
    pointers: list[int] = []
    clone = torch.Tensor.clone

    def counted(self: torch.Tensor) -> torch.Tensor:
        copy = clone(self)
        pointers.append(copy.data_ptr() - self.data_ptr())
        return copy

    llm, _ = make_llm(replace(world, models=replace(world.models, target=target)), proposer="none")
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    llm.generate(REQUESTS[:1])
    assert pointers
    assert all(pointers)


def test_what_processes_do_not_run(world: World) -> None:
    """Captured rounds and measured draft counts need one process; ranks have one each."""
    given = Overrides(device="cpu", pipeline_parallel=2)
    assert resolve_config(world.manifest, given).stage_mode == "processes"
    assert resolve_config(world.manifest, given).graphs == "off"
    for wrong in (
        replace(given, length_mode="compact"),
        replace(given, tensor_parallel=2, stages_in_process=True),
    ):
        with pytest.raises(DiagnosticError, match="SD832"):
            resolve_config(world.manifest, wrong)
    idle = resolve_config(
        world.manifest, Overrides(device="cpu", stage_layers=(2, 2), stages_in_process=True)
    )
    assert [item.code for item in idle.diagnostics] == ["SD805", "SD805"]
    for layers, code in (((1, 1), "SD851"), ((4,), "SD851")):
        with pytest.raises(DiagnosticError, match=code):
            resolve_config(world.manifest, replace(given, stage_layers=layers))
