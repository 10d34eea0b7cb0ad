"""`specctl build-token-map`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from specctl.cli import output
from specctl.cli.shared_options import Json
from specctl.ops.build_token_map import OUTPUT, Progress
from specctl.ops.build_token_map import build_token_map as build
from specctl.ops.token_map_report import TokenMapReport
from specctl.tokenmap.coverage import MAX_LOSS

_MAX_LISTED = 24


def build_token_map(
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...", help="Text, Markdown or jsonl files, directories, quoted patterns."
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Target's directory; default: of ./manifest.yaml."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ids in the map; default: from the coverage curve."),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(metavar="X", help="Held-out coverage that the default size may give up."),
    ] = MAX_LOSS,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Field of jsonl lines; again to join several."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Count chat messages of this role only; repeatable."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Id or token that must be in the map; repeatable."),
    ] = None,
    output_directory: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Directory for the files.")
    ] = OUTPUT,
    json: Json = False,
) -> None:
    """Count a corpus and write a reduced vocabulary: JSON, .pt and d2t/t2d safetensors.

    One document in ten is held out by its content and measures coverage. End ids, special tokens
    and the tokens of the chat template are always in the map.
    """
    if not 0 <= max_loss < 1:
        raise typer.BadParameter(
            "a share of tokens, 0 or more and below 1", param_hint="--max-loss"
        )
    if not output_directory.strip():
        raise typer.BadParameter("the path is empty", param_hint="--output")
    _refuse_unwritable(Path(output_directory).absolute())
    with output.writing(output_directory), output.progress("corpus", 100) as step:
        report = build(
            corpus,
            tokenizer=tokenizer,
            size=size,
            max_loss=max_loss,
            fields=field or (),
            roles=role or (),
            keep=keep or (),
            output=output_directory,
            progress=_percent(step),
        )
    for diagnostic in report.diagnostics:
        output.talk_problem(diagnostic)
    if json:
        output.answer_json(report)
    else:
        output.answer(summary(report))


def _refuse_unwritable(directory: Path) -> None:
    """Refuse an output directory that cannot be made, before anything is counted."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"`{nearest}` is not a directory", param_hint="--output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"`{nearest}` is not writable", param_hint="--output")


def _percent(step: Callable[[str], None]) -> Progress:
    """Turn bytes into the hundred steps of the bar: ten for reading, ninety for counting."""
    shown = 0

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal shown
        share = min(1.0, done / max(1, total))
        percent = int(10 * share if phase == "reading" else 10 + 90 * share)
        for _ in range(shown, percent):
            step(phase)
        shown = max(shown, percent)

    return progress


def summary(report: TokenMapReport) -> str:
    """Return the report as terminal text."""
    r = report
    share = r.size / r.target_vocab_size
    other = f"; the rule gives {r.recommended_size}" if r.size_origin == "given" else ""
    lines = [
        f"token map     {r.size} of {r.target_vocab_size} ids ({share:.1%})",
        f"coverage      {r.coverage:.2%} of held-out tokens",
        f"size          {r.size}, {r.size_origin}" + other,
        f"rule          {r.size_rule}",
        f"corpus        {r.num_documents} documents in {r.num_files} files",
        f"counted       {r.num_tokens} tokens",
        f"held out      {r.num_held_out_documents} documents, {r.num_held_out_tokens} tokens",
        f"tokenizer     {r.tokenizer}, {r.tokenizer_size} ids",
        "",
        "  size      held-out coverage",
        *(_curve_line(point.size, point.coverage, r) for point in r.curve),
        f"  (all ids seen in the counted text: {r.coverage_of_seen:.2%})",
        "",
        f"forced ids    {len(r.forced)}",
        *(
            f"  {f.target_id:<8}  {f.token!a}  ({', '.join(f.reasons)})"
            for f in r.forced[:_MAX_LISTED]
        ),
    ]
    if len(r.forced) > _MAX_LISTED:
        lines.append(f"  and {len(r.forced) - _MAX_LISTED} more; --json lists all")
    if r.num_reserved:
        lines.append(f"  {r.num_reserved} reserved special tokens were left out")
    lines += [f"displaced     {_ids(r.displaced)}", "", f"files in {Path(r.directory)}/"]
    lines += [f"  {name}" for name in r.files]
    return "\n".join(lines)


def _curve_line(size: int, coverage: float, report: TokenMapReport) -> str:
    mark = "  <- this map" if size == report.size else ""
    return f"  {size:<8}  {coverage:8.2%}{mark}"


def _ids(ids: tuple[int, ...]) -> str:
    if not ids:
        return "no id that frequency alone would have chosen"
    listed = ", ".join(map(str, ids[:_MAX_LISTED]))
    more = f" and {len(ids) - _MAX_LISTED} more" if len(ids) > _MAX_LISTED else ""
    return f"{len(ids)} ids that frequency alone would have chosen: {listed}{more}"
