"""`specctl manifest`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from specctl.checkpoint import Access, write_text_atomic
from specctl.cli import output
from specctl.cli.access_options import AllowPickle, Offline
from specctl.contract.codec import dump_manifest, manifest_json_schema
from specctl.ops.emit_manifest import Given, build_manifest


class Numbering(str, Enum):
    """What captured-layer ids count."""

    output = "output"
    boundary = "boundary"


def manifest(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="The target: a directory, hf:org/name or ms:org/name."
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Argument(metavar="[DRAFT]", help="The draft, likewise.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write, .yaml or .json; none: stdout."
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens", "--gamma", min=1, help="Draft tokens for each round."
        ),
    ] = None,
    token_map: Annotated[
        str | None,
        typer.Option("--token-map", metavar="FILE", help="Allowed target ids, in draft order."),
    ] = None,
    aux_layer_ids: Annotated[
        str | None,
        typer.Option(
            "--aux-layer-ids",
            metavar="I,J,K",
            help="Captured layers, 0-based, output of that layer, -1 = embedding.",
        ),
    ] = None,
    aux_numbering: Annotated[
        Numbering | None,
        typer.Option(
            "--aux-numbering",
            help="What captured-layer ids count: output (of layers) or boundary (between them).",
        ),
    ] = None,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a manifest and stop.")
    ] = False,
) -> None:
    """Write the manifest of a target and its draft, each fact with its origin.

    Without a draft the manifest decodes with the target alone. Any error refuses the manifest
    and nothing is written; warnings go to stderr and into the file.
    """
    if schema:
        output.answer_json(manifest_json_schema())
        return
    if target is None:
        raise typer.BadParameter("name the target's directory", param_hint="TARGET")
    given = Given(
        token_map=token_map,
        num_speculative_tokens=num_speculative_tokens,
        aux_layer_ids=parse_layer_ids(aux_layer_ids),
        aux_numbering=_numbering(aux_numbering),
    )
    directory = Path.cwd() if out is None else out.parent
    access = Access(offline=offline, allow_pickle=allow_pickle)
    emission = build_manifest(target, draft, given=given, manifest_dir=directory, access=access)
    for diagnostic in emission.diagnostics:
        output.talk_problem(diagnostic)
    text = dump_manifest(emission.manifest, as_json=out is not None and out.suffix == ".json")
    if out is None:
        output.answer(text.rstrip("\n"))
        return
    with output.writing(out):
        write_text_atomic(out, text)
    output.talk(f"wrote {out}")


def _numbering(value: Numbering | None) -> Literal["output", "boundary"] | None:
    if value is None:
        return None
    return "output" if value is Numbering.output else "boundary"


def parse_layer_ids(text: str | None) -> tuple[int, ...] | None:
    """Return `1,14,26` as numbers."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"`{text}` is not a list of integers such as 1,14,26", param_hint="--aux-layer-ids"
        ) from None
