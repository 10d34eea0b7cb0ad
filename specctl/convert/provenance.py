"""What an output says about where it comes from: `specctl.json`.

Invariants: deterministic. It holds no time and no path of this machine: a local source is named by
its directory's name and the digests of its config and headers, a hub source by id and revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specctl import __version__
from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.text import printable
from specctl.convert.layout import Layout
from specctl.formats.written import Copy, Joined, Origin, Rows, Span, TensorSource, loss_of

SCHEMA = 1


def provenance_record(
    checkpoints: Mapping[Origin, Checkpoint],
    *,
    command: str,
    source_format: str | None,
    written_format: str | None,
    given: Mapping[str, object],
    diagnostics: Iterable[Diagnostic],
    fixes: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the record without the tensors.

    Args:
        checkpoints: the sources by origin.
        command: `convert`, `normalize` or `stitch`.
        source_format: format that the draft was read in.
        written_format: format that was written.
        given: facts that the user stated, by option; None is left out.
        diagnostics: findings of source and writer, none of which refused the conversion.
        fixes: names of the fixes that were applied.
    """
    found = list(diagnostics)
    return {
        "schema": SCHEMA,
        "specctl_version": __version__,
        "command": command,
        "source_format": source_format,
        "written_format": written_format,
        "sources": {origin: _source(checkpoint) for origin, checkpoint in checkpoints.items()},
        "given": {name: value for name, value in given.items() if value is not None},
        "losses_allowed": sorted({name for d in found if (name := loss_of(d)) is not None}),
        "diagnostics_accepted": [
            {"code": d.code, "severity": d.severity, "message": d.message}
            for d in found
            if d.severity != "info" and loss_of(d) is None
        ],
        "fixes": list(fixes),
    }


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    root = checkpoint.root
    return {
        "source": checkpoint.store.identity if root is None else printable(root.resolve().name),
        "revision": checkpoint.revision,
        "config_digest": checkpoint.config_digest,
        "files": [
            {"file": f.file, "size_bytes": f.size_bytes, "header_digest": f.header_digest}
            for f in checkpoint.files
        ],
    }


def tensor_table(
    layout: Layout, digests: Mapping[str, str], *, is_draft_only: bool = False
) -> dict[str, Any]:
    """Return key -> where the bytes come from and, when taken, their digest.

    Args:
        layout: of the output.
        digests: key -> digest.
        is_draft_only: leave out what a target keeps of its own.
    """
    table: dict[str, Any] = {}
    for file in layout.files:
        for key, source in file.tensors.items():
            if is_draft_only and isinstance(source, Copy) and source.origin == "target":
                continue
            row: dict[str, Any] = {"from": tensor_origin(source)}
            if key in digests:
                row["digest"] = digests[key]
            table[key] = row
    return dict(sorted(table.items()))


def tensor_origin(source: TensorSource) -> str:
    """Return one line that says where a tensor's bytes come from."""
    if isinstance(source, Copy):
        return f"{source.origin} {source.ref.file}::{source.ref.key}"
    if isinstance(source, Rows):
        return f"{source.origin} {source.ref.file}::{source.ref.key}, {len(source.rows)} rows"
    if isinstance(source, Joined):
        first = source.parts[0]
        return f"{source.origin} {first.file}::{first.key} and {len(source.parts) - 1} more, joined"
    if isinstance(source, Span):
        place = f"{source.ref.file}::{source.ref.key}"
        return f"{source.origin} {place}, from byte {source.begin_bytes}"
    return "computed"
