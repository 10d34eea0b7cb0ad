"""`specctl convert`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from specctl.cli import output
from specctl.cli.convert_answer import answer_report
from specctl.cli.shared_options import (
    AllowPickle,
    AuxLayerIds,
    AuxNumbering,
    DraftTokens,
    Json,
    Offline,
    parse_layer_ids,
)
from specctl.cli.write_options import (
    DEFAULT_SHARD_SIZE,
    Force,
    MaxShardSize,
    NoDigests,
    output_directory,
    write_options,
)
from specctl.convert.dialects import GGUF_MAP, dialect_lines
from specctl.formats.written import LOSSES
from specctl.ops.convert import Options
from specctl.ops.convert import convert as run_convert
from specctl.ops.convert_map import write_map
from specctl.ops.convert_report import ConvertReport
from specctl.ops.draft_parts import read_parts
from specctl.ops.given import Given
from specctl.ops.stitch import stitch as run_stitch


def _list_dialects(name: str | None) -> str | None:
    if name == "help":
        output.answer("\n".join(dialect_lines()))
        raise typer.Exit
    return name


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Draft, or target with prediction layers: directory, hf:org/name, ms:org/name.",
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="DIALECT",
            help="What to write; `--to help` lists the names.",
            is_eager=True,  # `--to help` needs no SOURCE
            callback=_list_dialects,
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--output", "-o", metavar="OUT", help="Directory to write.")
    ] = None,
    stitch_into: Annotated[
        str | None,
        typer.Option(
            "--stitch-into",
            metavar="TARGET",
            help="Write this target with the prediction layers of SOURCE, in place of --to.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="TARGET", help="Target of the draft: its head, embedding and name."
        ),
    ] = None,
    target_name: Annotated[
        str | None,
        typer.Option("--target-name", metavar="NAME", help="Hub id to record as the target."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="LOSS", help="Accept a named loss; may be repeated."),
    ] = None,
    token_map: Annotated[
        str | None,
        typer.Option(
            "--token-map", metavar="FILE", help="Cut a full head to these target ids (d2t, t2d)."
        ),
    ] = None,
    full_vocabulary: Annotated[
        bool,
        typer.Option(
            "--full-vocabulary", help="Put the target's full head back where rows were cut from it."
        ),
    ] = False,
    num_speculative_tokens: DraftTokens = None,
    aux_layer_ids: AuxLayerIds = None,
    aux_numbering: AuxNumbering = None,
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    no_digests: NoDigests = False,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")
    ] = False,
    json: Json = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Write a draft in another dialect, byte for byte the same tensors.

    The output is read again before it appears, whole or not at all; an output that is there and
    equal is left alone. Exit 1 when a finding is an error: nothing is written then.
    """
    out = output_directory(out, is_dry_run=dry_run)
    options = write_options(
        max_shard_size=max_shard_size,
        no_digests=no_digests,
        force=force,
        dry_run=dry_run,
        offline=offline,
        allow_pickle=allow_pickle,
    )
    if stitch_into is not None:
        _refuse_unused(
            "--stitch-into",
            {
                "--to": to,
                "--target": target,
                "--target-name": target_name,
                "--allow": allow,
                "--token-map": token_map,
                "--full-vocabulary": full_vocabulary,
                "--num-speculative-tokens": num_speculative_tokens,
                "--aux-layer-ids": aux_layer_ids,
                "--aux-numbering": aux_numbering,
            },
        )
        answer_report(run_stitch(source, stitch_into, out=out, options=options), as_json=json)
        return
    if to is None:
        raise typer.BadParameter("name a dialect; `--to help` lists them", param_hint="--to")
    given = Given(
        token_map=token_map,
        num_speculative_tokens=num_speculative_tokens,
        aux_layer_ids=parse_layer_ids(aux_layer_ids),
        aux_numbering=None if aux_numbering is None else aux_numbering.value,
        target_name=target_name,
    )
    report = _converted(
        source,
        to,
        out=out,
        target=target,
        given=given,
        allow=known_losses(allow or ()),
        is_full_vocabulary=full_vocabulary,
        options=options,
    )
    answer_report(report, as_json=json)


def _converted(
    source: str,
    to: str,
    *,
    out: str,
    target: str | None,
    given: Given,
    allow: tuple[str, ...],
    is_full_vocabulary: bool,
    options: Options,
) -> ConvertReport:
    """Write a draft in another dialect, or its map alone."""
    whole = {"--full-vocabulary": is_full_vocabulary}
    if given.token_map is not None:
        _refuse_unused("--token-map", whole)
    if to == GGUF_MAP:
        _refuse_unused(f"--to {GGUF_MAP}", {"--token-map": given.token_map, **whole})
        parts = read_parts(source, target, given, access=options.access)
        return write_map(parts, out=out, allow=allow, options=options)
    return run_convert(
        source,
        to=to,
        out=out,
        target=target,
        given=given,
        allow=allow,
        is_full_vocabulary=is_full_vocabulary,
        options=options,
    )


def _refuse_unused(chosen: str, options: Mapping[str, object]) -> None:
    """Refuse options that would have no effect beside the one that was chosen."""
    for name, value in options.items():
        if value:
            raise typer.BadParameter(f"it has no effect with `{chosen}`", param_hint=name)


def known_losses(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names; one that is no loss is wrong usage."""
    for name in names:
        if name not in LOSSES:
            raise typer.BadParameter(
                f"`{name}` is no loss; the names are {', '.join(LOSSES)}", param_hint="--allow"
            )
    return tuple(names)
