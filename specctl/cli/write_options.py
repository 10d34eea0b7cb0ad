"""The options of `convert` and `normalize` that say how a checkpoint is written."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.checkpoint import Access, is_hub_source
from specctl.convert.layout import DEFAULT_SHARD_BYTES
from specctl.convert.sizes import parse_size
from specctl.ops.convert import Options

DEFAULT_SHARD_SIZE = f"{DEFAULT_SHARD_BYTES // 10**9}GB"

MaxShardSize = Annotated[
    str,
    typer.Option("--max-shard-size", metavar="SIZE", help="Write shards above this, such as 5GB."),
]
NoDigests = Annotated[
    bool,
    typer.Option("--no-digests", help="Do not put a digest of each tensor into specctl.json."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace an output directory that specctl wrote.")
]


def output_directory(out: str | None, *, is_dry_run: bool) -> str:
    """Return the directory to write; none but for a dry run, and one on a hub, is wrong usage."""
    if out is None and is_dry_run:
        return "OUT"
    if out is None or not out.strip():
        raise typer.BadParameter("name the directory to write", param_hint="--output")
    if is_hub_source(out):
        raise typer.BadParameter(
            f"`{out}` is on a hub, and output is written to this machine only; `./{out}` is a "
            "directory of that name",
            param_hint="--output",
        )
    return out


def write_options(
    *,
    max_shard_size: str,
    no_digests: bool,
    force: bool,
    dry_run: bool,
    offline: bool,
    allow_pickle: bool,
) -> Options:
    """Return what the options ask for; a text that is no size is wrong usage."""
    try:
        max_shard_bytes = parse_size(max_shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from error
    return Options(
        max_shard_bytes=max_shard_bytes,
        is_forced=force,
        is_dry_run=dry_run,
        has_digests=not no_digests,
        access=Access(offline=offline, allow_pickle=allow_pickle),
    )
