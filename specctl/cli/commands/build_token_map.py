"""`specctl build-token-map`."""

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
from specctl.ops.build_token_map import build_token_map as build
from specctl.ops.cut_token_map import OUTPUT


def build_token_map(
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...", help="Text, Markdown or jsonl files, directories, quoted patterns."
        ),
    ],
    tokenizer: Tokenizer = None,
    size: Size = None,
    divisible_by: DivisibleBy = 1,
    max_loss: MaxLoss = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Field of jsonl lines; again to join several."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Count chat messages of this role only; repeatable."),
    ] = None,
    counts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the counts in a file; used again for the same corpus."
        ),
    ] = None,
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
    """Count a corpus and write reduced vocabularies: JSON, .pt, d2t/t2d safetensors, freq_N.pt.

    One document in ten is held out by its content and measures coverage. End ids, special tokens
    and the tokens of the chat template are always in the map.
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
        with output.bar("reading") as step:
            report = build(
                corpus,
                tokenizer=tokenizer,
                options=options,
                fields=field or (),
                roles=role or (),
                counts=counts,
                progress=step,
            )
        answer_report(report, options.output, is_json=json)
