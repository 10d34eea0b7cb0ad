"""Plan a serving layout: what each pipeline stage and tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest
from specctl.contract.rank_split import rank_problems
from specctl.contract.stage_split import Stage, split_stages


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a plan; bytes are as stored, of the whole stage.

    Args:
        layers: first and last layer, both included.
        draft_embedding: `own`, `target`, `head` or `checkpoint`; None without a draft.
        rank_bytes: of one tensor-parallel rank, rounded up: norms, which every rank has whole, are
            too small to tell apart here.
    """

    stage: int
    layers: tuple[int, int]
    num_layers: int
    has_embedding: bool
    has_head: bool
    draft_embedding: str | None
    target_bytes: int
    draft_bytes: int
    rank_bytes: int


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a manifest over `pipeline_parallel * tensor_parallel` processes.

    Args:
        balance: bytes of the heaviest stage over the mean of all.
        draft_layout: how the draft is spread.
    """

    manifest: str
    pipeline_parallel: int
    tensor_parallel: int
    stages: list[StageRow]
    balance: float
    draft_layout: str | None


def plan(
    manifest: Path,
    *,
    pipeline_parallel: int = 1,
    tensor_parallel: int = 1,
    draft_tensor_parallel: int | None = None,
    stage_layers: Sequence[int] | None = None,
) -> PlanReport:
    """Return what each stage of a layout holds.

    Args:
        manifest: a manifest file.
        pipeline_parallel: stages.
        tensor_parallel: ranks of each stage.
        draft_tensor_parallel: the same number, or 1: the draft is whole on every rank; None: the
            same.
        stage_layers: layers of each stage; None balances bytes.

    Raises:
        DiagnosticError: SD850, SD851 (stages), SD852, SD832 (ranks), and family 7 codes of a
            manifest that cannot be read.
    """
    facts = load_manifest(manifest)
    problems = plan_problems(facts, tensor_parallel, draft_tensor_parallel)
    if problems:
        raise DiagnosticError(problems)
    draft_ranks = draft_tensor_parallel or tensor_parallel
    stages = split_stages(facts, pipeline_parallel, stage_layers=stage_layers)
    total = sum(stage.num_bytes for stage in stages)
    return PlanReport(
        manifest=str(manifest),
        pipeline_parallel=pipeline_parallel,
        tensor_parallel=tensor_parallel,
        stages=[_row(stage, tensor_parallel, draft_ranks) for stage in stages],
        balance=max(s.num_bytes for s in stages) * len(stages) / total if total else 1.0,
        draft_layout=None if facts.draft is None else f"pp=1, tp={draft_ranks}",
    )


def plan_problems(
    manifest: Manifest, tensor_parallel: int, draft_tensor_parallel: int | None
) -> list[Diagnostic]:
    """Return why ranks cannot share the models: SD832 and SD852, as `serve` refuses them."""
    is_whole = draft_tensor_parallel == 1
    problems = rank_problems(manifest, tensor_parallel, is_draft_split=not is_whole)
    if draft_tensor_parallel not in (None, 1, tensor_parallel):
        problems.append(
            diagnose(
                "SD832",
                where="--draft-tp",
                message=f"the draft has {draft_tensor_parallel} ranks, the target "
                f"{tensor_parallel}",
                expected=f"1 or {tensor_parallel}",
                found=draft_tensor_parallel,
            )
        )
    return problems


def _row(stage: Stage, tensor_parallel: int, draft_tensor_parallel: int) -> StageRow:
    return StageRow(
        stage=stage.index,
        layers=(stage.first_layer, stage.end_layer - 1),
        num_layers=stage.num_layers,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
        draft_embedding=stage.draft_embedding,
        target_bytes=stage.target_bytes,
        draft_bytes=stage.draft_bytes,
        rank_bytes=-(-stage.target_bytes // tensor_parallel)
        - (-stage.draft_bytes // draft_tensor_parallel),
    )
