"""`specctl normalize`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.convert_answer import answer_report
from specctl.cli.shared_options import AllowPickle, Json, Offline
from specctl.cli.write_options import (
    DEFAULT_SHARD_SIZE,
    Force,
    MaxShardSize,
    NoDigests,
    output_directory,
    write_options,
)
from specctl.convert.settings import SETTINGS
from specctl.ops.normalize import normalize as run_normalize


def normalize(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Draft: a directory, hf:org/name or ms:org/name."),
    ],
    out: Annotated[
        str | None, typer.Option("--output", "-o", metavar="OUT", help="Directory to write.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="Target that the draft is for."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help=f"State a fact; may be repeated. Names: {', '.join(SETTINGS)}.",
        ),
    ] = None,
    unsafe_fixes: Annotated[
        bool,
        typer.Option("--unsafe-fixes", help="Apply also fixes that follow from a guess."),
    ] = False,
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    no_digests: NoDigests = False,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")
    ] = False,
    json: Json = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Write a draft again in its own dialect, with every fact stated in the usual place.

    Safe fixes only, unless asked. The source is never changed. Exit 1 when a finding that no fix
    settles is an error: nothing is written then.
    """
    out = output_directory(out, is_dry_run=dry_run)
    report = run_normalize(
        source,
        out=out,
        target=target,
        settings=tuple(setting or ()),
        is_unsafe=unsafe_fixes,
        options=write_options(
            max_shard_size=max_shard_size,
            no_digests=no_digests,
            force=force,
            dry_run=dry_run,
            offline=offline,
            allow_pickle=allow_pickle,
        ),
    )
    answer_report(report, as_json=json, is_normal_form=True)
