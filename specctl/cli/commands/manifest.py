"""`specctl manifest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specctl.checkpoint import Access, write_text_atomic
from specctl.cli import output
from specctl.cli.shared_options import (
    AllowPickle,
    AuxLayerIds,
    AuxNumbering,
    DraftTokens,
    Offline,
    Verification,
    parse_layer_ids,
)
from specctl.contract.codec import dump_manifest, manifest_json_schema
from specctl.ops.emit_manifest import build_manifest
from specctl.ops.given import Given
from specctl.ops.verification_mode import with_verification


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
    num_speculative_tokens: DraftTokens = None,
    token_map: Annotated[
        str | None,
        typer.Option("--token-map", metavar="FILE", help="Allowed target ids, in draft order."),
    ] = None,
    aux_layer_ids: AuxLayerIds = None,
    aux_numbering: AuxNumbering = None,
    verification: Verification = None,
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
        aux_numbering=None if aux_numbering is None else aux_numbering.value,
    )
    directory = Path.cwd() if out is None else out.parent
    access = Access(offline=offline, allow_pickle=allow_pickle)
    emission = build_manifest(target, draft, given=given, manifest_dir=directory, access=access)
    for diagnostic in emission.diagnostics:
        output.talk_problem(diagnostic)
    written = emission.manifest
    if verification is not None:
        written = with_verification(written, verification.value)
    text = dump_manifest(written, as_json=out is not None and out.suffix == ".json")
    if out is None:
        output.answer(text.rstrip("\n"))
        return
    with output.writing(out):
        write_text_atomic(out, text)
    output.talk(f"wrote {out}")
