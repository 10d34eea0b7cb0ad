"""The options that `build-token-map` and `cut-token-map` share, and what they become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from specctl.ops.cut_token_map import OUTPUT, CutOptions
from specctl.ops.token_map_cost import CostOptions
from specctl.tokenmap.sizes import SizeTextError, parse_sizes, parse_weights

Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="DIR", help="Target's directory; default: of ./manifest.yaml."
    ),
]
Size = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="N",
        help="Ids in the map; several as 16k,32k (1k = 1,024); default: by the cost model.",
    ),
]
DivisibleBy = Annotated[
    int,
    typer.Option(
        "--divisible-by", metavar="TP", min=1, max=4096, help="Ranks that share the head."
    ),
]
MaxLoss = Annotated[
    float | None,
    typer.Option(
        "--max-loss",
        metavar="X",
        help="Default size: the smallest that loses at most this share, instead of the cost model.",
    ),
]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        "--weight", metavar="DOMAIN=W", help="Count a domain W times, such as code=2; repeatable."
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="ID",
        help="Id, token or range of characters (U+4E00-U+9FFF) that must be in; repeatable.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        "--outputs",
        metavar="FILE",
        help="What the target wrote: bench -o directory, jsonl of ids or texts, JSON#KEY; again.",
    ),
]
ManifestFile = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="FILE", help="Numbers of the cost model: the draft's."),
]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance", metavar="P", min=0, max=1, help="Cost model: acceptance with a full head."
    ),
]
LostRatio = Annotated[
    float | None,
    typer.Option(
        "--lost-ratio",
        metavar="R",
        min=0,
        max=1,
        help="Cost model: acceptance at tokens the map loses, over that at all; 1 is the bound.",
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens", "--gamma", min=1, max=64, help="Cost model: drafts a round."
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option("--bandwidth", metavar="GB/S", help="Cost model: memory bandwidth in GB/s."),
]
OutputDirectory = Annotated[
    str, typer.Option("--output", "-o", metavar="DIR", help="Directory for the files.")
]


def cut_options(
    *,
    size: list[str] | None,
    divisible_by: int,
    max_loss: float | None,
    weight: list[str] | None,
    keep: list[str] | None,
    outputs: list[str] | None,
    manifest: Path | None,
    acceptance: float | None,
    lost_ratio: float | None,
    gamma: int | None,
    bandwidth: float | None,
    output: str = OUTPUT,
) -> CutOptions:
    """Return what the options ask for; a value that is none is wrong usage."""
    if max_loss is not None and not 0 <= max_loss < 1:
        raise typer.BadParameter(
            "a share of tokens, 0 or more and below 1", param_hint="--max-loss"
        )
    if bandwidth is not None and not bandwidth > 0:
        raise typer.BadParameter("a number above 0", param_hint="--bandwidth")
    if not output.strip():
        raise typer.BadParameter("the path is empty", param_hint="--output")
    _refuse_unwritable(Path(output).absolute())
    try:
        sizes = parse_sizes(size or ())
    except SizeTextError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from error
    try:
        weights = parse_weights(weight or ())
    except SizeTextError as error:
        raise typer.BadParameter(str(error), param_hint="--weight") from error
    return CutOptions(
        sizes=sizes,
        divisible_by=divisible_by,
        max_loss=max_loss,
        weights=weights,
        keep=tuple(keep or ()),
        outputs=tuple(outputs or ()),
        cost=CostOptions(
            manifest=manifest,
            acceptance=acceptance,
            lost_ratio=lost_ratio,
            num_speculative_tokens=gamma,
            bandwidth=None if bandwidth is None else bandwidth * 1e9,
        ),
        output=Path(output),
    )


def _refuse_unwritable(directory: Path) -> None:
    """Refuse an output directory that cannot be made, before anything is counted."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"`{nearest}` is not a directory", param_hint="--output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"`{nearest}` is not writable", param_hint="--output")
