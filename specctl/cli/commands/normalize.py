"""`specctl normalize`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.checkpoint import Access
from specctl.cli.access_options import AllowPickle, Offline
from specctl.cli.commands.convert import shard_bytes
from specctl.cli.convert_answer import answer_report
from specctl.convert.layout import DEFAULT_SHARD_BYTES
from specctl.convert.settings import SETTINGS
from specctl.ops.convert import Options
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
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Write shards above this, such as 5GB."
        ),
    ] = f"{DEFAULT_SHARD_BYTES // 10**9}GB",
    no_digests: Annotated[
        bool,
        typer.Option("--no-digests", help="Do not put a digest of each tensor into specctl.json."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output directory that specctl wrote.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document.")] = False,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Write a draft again in its own dialect, with every fact stated in the usual place.

    Safe fixes only, unless asked. The source is never changed. Exit 1 when a finding that no fix
    settles is an error: nothing is written then.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("name the directory to write", param_hint="--output")
    report = run_normalize(
        source,
        out=out or "OUT",
        target=target,
        settings=tuple(setting or ()),
        is_unsafe=unsafe_fixes,
        options=Options(
            max_shard_bytes=shard_bytes(max_shard_size),
            is_forced=force,
            is_dry_run=dry_run,
            has_digests=not no_digests,
            access=Access(offline=offline, allow_pickle=allow_pickle),
        ),
    )
    answer_report(report, as_json=json)
