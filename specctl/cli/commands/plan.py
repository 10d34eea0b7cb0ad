"""`specctl plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli import output
from specctl.cli.shared_options import DraftTensorParallel, Json, optional_integers
from specctl.ops.plan import PlanReport, StageRow
from specctl.ops.plan import plan as make_plan


def plan(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The manifest to serve.")],
    pp: Annotated[
        int, typer.Option("--pp", metavar="N", min=1, help="Pipeline stages.", show_default=True)
    ] = 1,
    tp: Annotated[
        int,
        typer.Option(
            "--tp", metavar="N", min=1, help="Tensor-parallel ranks of a stage.", show_default=True
        ),
    ] = 1,
    draft_tp: DraftTensorParallel = None,
    stage_layers: Annotated[
        str | None,
        typer.Option(
            "--stage-layers",
            metavar="N,N,...",
            help="Target layers of each stage; none: the heaviest stage is as light as can be.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what each pipeline stage holds: layers, embedding, head, draft and bytes."""
    counts = optional_integers(stage_layers, "--stage-layers")
    report = make_plan(
        manifest,
        pipeline_parallel=pp,
        tensor_parallel=tp,
        draft_tensor_parallel=draft_tp,
        stage_layers=counts,
    )
    if json:
        output.answer_json(report)
        return
    for line in _lines(report):
        output.answer(line)


def _lines(report: PlanReport) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("stage", "layers", "holds", "target bytes", "draft bytes", "bytes of a rank")
    ]
    rows += [_cells(stage) for stage in report.stages]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index >= 3 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.append(f"heaviest stage over the mean: {report.balance:.3f}")
    if report.draft_layout is not None:
        lines.append(f"draft: on the last stage, {report.draft_layout}")
    return lines


def _cells(stage: StageRow) -> tuple[str, ...]:
    holds = ["embedding"] if stage.has_embedding else []
    holds += ["head"] if stage.has_head else []
    if stage.draft_embedding is not None:
        holds.append(f"draft (embedding: {stage.draft_embedding})")
    return (
        str(stage.stage),
        f"{stage.layers[0]}-{stage.layers[1]} ({stage.num_layers})",
        ", ".join(holds) or "layers",
        f"{stage.target_bytes:,}",
        f"{stage.draft_bytes:,}",
        f"{stage.rank_bytes:,}",
    )
