"""`specctl cut-token-map`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.cli import output
from specctl.cli.shared_options import Json
from specctl.cli.token_map_answer import answer_report
from specctl.cli.token_map_options import (
    Acceptance,
    Bandwidth,
    DivisibleBy,
    Gamma,
    Keep,
    LostRatio,
    ManifestFile,
    MaxLoss,
    OutputDirectory,
    Outputs,
    Size,
    Tokenizer,
    Weight,
    cut_options,
)
from specctl.ops.cut_token_map import OUTPUT, cut_from_file


def cut_token_map(
    counts: Annotated[
        Path,
        typer.Argument(
            metavar="COUNTS", help="Count file, or a list of ids by frequency (FR-Spec)."
        ),
    ],
    tokenizer: Tokenizer = None,
    size: Size = None,
    divisible_by: DivisibleBy = 1,
    max_loss: MaxLoss = None,
    weight: Weight = None,
    keep: Keep = None,
    outputs: Outputs = None,
    manifest: ManifestFile = None,
    acceptance: Acceptance = None,
    lost_ratio: LostRatio = None,
    gamma: Gamma = None,
    bandwidth: Bandwidth = None,
    output_directory: OutputDirectory = OUTPUT,
    json: Json = False,
) -> None:
    """Cut token maps of any size from counts: nothing is counted again.

    Writes JSON, .pt, d2t/t2d safetensors and FR-Spec's freq_N.pt for each size, and a report.
    """
    options = cut_options(
        size=size,
        divisible_by=divisible_by,
        max_loss=max_loss,
        weight=weight,
        keep=keep,
        outputs=outputs,
        manifest=manifest,
        acceptance=acceptance,
        lost_ratio=lost_ratio,
        gamma=gamma,
        bandwidth=bandwidth,
        output=output_directory,
    )
    with output.writing(output_directory):
        report = cut_from_file(counts, tokenizer=tokenizer, options=options)
        answer_report(report, options.output, is_json=json)
