"""Two stages of two ranks each, as threads: rank t of a stage hands its states to rank t only."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import DRAFT_PROPOSERS, Overrides, resolve_config
from runtime.engine.build import build_engine
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, Lockstep, follow
from runtime.engine.request import RequestInput
from runtime.engine.stages import StageLine, StageWorker
from runtime.loading import load_models
from runtime.parallel.ranks import Ranks, ThreadExchange
from runtime.spec.types import SamplingParams
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import Stage, split_stages
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.queue_channel import QueueChannel
from tests.rank_harness import SMALL, Outcome, answer, on_rank_pairs, ranked_engine
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_last_state import write_mtp

REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 3 + 9 * index),
        params=params,
        max_tokens=14,
        ignore_eos=True,
    )
    for index, params in enumerate(
        (SamplingParams(), SamplingParams(temperature=0.8, seed=7), SamplingParams())
    )
)
PP, TP = 2, 2


def write_eagle3(directory: Path) -> Manifest:
    """Captured states of both stages go to the draft."""
    target = write_tiny_target(directory / "t", layer_gain=0.15)
    draft = write_agreeing_eagle3(directory / "d", target)
    return emit_manifest(str(target), str(draft), num_speculative_tokens=3)


def write_mtp_with_a_map(directory: Path) -> Manifest:
    """The draft's embedding is read from the target's files, its head from both ranks' rows."""
    target = write_tiny_target(directory / "t", num_layers=2, layer_gain=0.15)
    draft = write_mtp(directory / "d", target, is_agreeing=True)
    path = directory / "map.json"
    path.write_text(str([*range(90, 2, -1)]), encoding="utf-8")
    return emit_manifest(str(target), str(draft), num_speculative_tokens=3, token_map=str(path))


class Line:
    """The channels and sums of one layout, shared by its threads."""

    def __init__(self, manifest: Manifest, overrides: Overrides) -> None:
        self.manifest = manifest
        self.config = resolve_config(manifest, overrides)
        self.stages = split_stages(manifest, PP)
        self.first_ranks = ThreadExchange(TP, timeout_s=60).ranks()
        self.controls = [QueueChannel(timeout_s=60) for _ in range(TP)]
        self.states = [QueueChannel(timeout_s=60) for _ in range(TP)]

    def load(self, stage: Stage, ranks: Ranks):  # type: ignore[no-untyped-def]
        return load_models(
            self.manifest,
            Path("/"),
            device=torch.device("cpu"),
            dtype=torch.float32,
            with_draft=self.config.proposer in DRAFT_PROPOSERS,
            ranks=ranks,
            stage=stage,
        )

    def first_stage(self, tp_rank: int) -> None:
        models = self.load(self.stages[0], self.first_ranks[tp_rank])
        StageWorker(
            models.target,
            control=self.controls[tp_rank],
            upstream=None,
            downstream=self.states[tp_rank],
        ).run()

    def last_stage(self, ranks: Ranks, control: Ranks) -> Outcome | None:
        models = self.load(self.stages[1], ranks)
        stages = StageLine(
            models.target, controls=[self.controls[ranks.rank]], upstream=self.states[ranks.rank]
        )

        def build(order: EngineOrder) -> Engine:
            return build_engine(models, order.config, line=stages)

        try:
            if ranks.rank:
                follow(control, build)
                return None
            lockstep = Lockstep(control)
            found = answer(lockstep.open(EngineOrder(config=self.config), build), REQUESTS)
            lockstep.close()
            return found
        finally:
            stages.stop()


def run_layout(manifest: Manifest, overrides: Overrides) -> Outcome:
    line = Line(manifest, overrides)
    workers = [threading.Thread(target=line.first_stage, args=(rank,)) for rank in range(TP)]
    for worker in workers:
        worker.start()
    found, other = on_rank_pairs(TP, line.last_stage)
    for worker in workers:
        worker.join(60)
    assert other is None
    assert found is not None
    return found


@pytest.mark.parametrize("write", [write_eagle3, write_mtp_with_a_map])
def test_two_stages_of_two_ranks_change_no_token(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    """Equal to two ranks without stages, bit for bit, with a draft and without one."""
    manifest = write(tmp_path)
    alone = replace(SMALL, proposer="none")
    expected = on_rank_pairs(
        TP, lambda ranks, _: answer(ranked_engine(manifest, ranks, alone), REQUESTS)
    )[0]
    assert run_layout(manifest, alone).ids_target == expected.ids_target
    drafted = run_layout(manifest, SMALL)
    assert drafted.ids_target == expected.ids_target
    assert drafted.num_accepted_drafts > 5
