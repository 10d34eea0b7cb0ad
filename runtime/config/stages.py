"""Over how many pipeline stages the target is spread, where they run, and what they cannot run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.config.ledger import Ledger
from runtime.config.values import DEFAULT_RANK_TIMEOUT_S, GraphsMode, StageMode
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import Stage, split_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSettings:
    """The settled stages.

    Args:
        stages: of the pipeline, in order; one without a pipeline.
        mode: where they run.
    """

    stages: tuple[Stage, ...]
    mode: StageMode

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers of each stage; empty when there is one."""
        counts = tuple(stage.num_layers for stage in self.stages)
        return counts if len(counts) > 1 else ()


def settle_stages(
    ledger: Ledger, manifest: Manifest, device: torch.device, *, tensor_parallel: int
) -> StageSettings:
    """Return the stages and where they run.

    Findings: SD850, SD851 (no such split), SD832 (ranks in one process), SD805.
    """
    given = ledger.given
    count = ledger.pick("pipeline_parallel", 1)
    if count == 1:
        for name in ("stage_layers", "stages_in_process"):
            if getattr(given, name) is not None:
                ledger.idle(name, "`pipeline_parallel` is 1")
        ledger.note("stage_layers", (), "derived")
        alone: StageMode = "whole" if tensor_parallel == 1 else "processes"
        ledger.note("stage_mode", alone, "derived")
        return StageSettings(stages=split_stages(manifest, 1), mode=alone)
    try:
        stages = split_stages(manifest, count, stage_layers=given.stage_layers)
    except DiagnosticError as error:
        ledger.found += error.diagnostics
        stages = split_stages(manifest, 1)
    ledger.note("stage_layers", None, "derived" if given.stage_layers is None else "given")
    return StageSettings(stages=stages, mode=_settle_mode(ledger, device, count, tensor_parallel))


def settle_staged_graphs(ledger: Ledger, graphs: GraphsMode, mode: StageMode) -> GraphsMode:
    """Return whether rounds are captured: a round over several processes is not.

    Findings: SD805, captures are asked for; SD832, draft counts that follow measured costs.
    """
    if mode != "processes":
        return graphs
    if (length_mode := ledger.given.length_mode or "static") != "static":
        ledger.refuse(
            "SD832",
            "length_mode",
            f"`length_mode` is {length_mode}: costs are measured on rounds of one process",
            expected="static",
            found=length_mode,
        )
    if ledger.given.graphs not in (None, "off"):
        ledger.idle("graphs", "a round over several processes is not captured")
    return ledger.note("graphs", "off", "derived")


def settle_rank_timeout(ledger: Ledger, mode: StageMode) -> float:
    """Return how long processes wait for each other's next word.

    Findings: SD805, there is one process.
    """
    if mode != "processes" and ledger.given.rank_timeout_s is not None:
        ledger.idle("rank_timeout_s", "there is one process")
    return ledger.pick("rank_timeout_s", DEFAULT_RANK_TIMEOUT_S)


def _settle_mode(
    ledger: Ledger, device: torch.device, count: int, tensor_parallel: int
) -> StageMode:
    given = ledger.given.stages_in_process
    is_sharing = device.type == "cuda" and torch.cuda.device_count() < count * tensor_parallel
    is_in_process = is_sharing and tensor_parallel == 1 if given is None else given
    if is_in_process and tensor_parallel > 1:
        ledger.refuse(
            "SD832",
            "stages_in_process",
            f"stages of {tensor_parallel} ranks are processes of their own",
            expected="`--tp 1`",
            found=tensor_parallel,
        )
    mode: StageMode = "in-process" if is_in_process else "processes"
    return ledger.note("stage_mode", mode, "derived" if given is None else "given")
