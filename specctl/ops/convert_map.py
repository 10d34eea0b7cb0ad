"""Write the map file of `convert --to gguf-map`."""

from __future__ import annotations

from pathlib import Path

from specctl.checkpoint import atomic_write
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.convert.dialects import GGUF_MAP
from specctl.convert.gguf_map import gguf_map
from specctl.convert.layout import json_bytes
from specctl.convert.losses import judge_losses, losses_in
from specctl.ops.convert import Options, left_open
from specctl.ops.convert_report import ConvertReport, OutputFileFacts, refused
from specctl.ops.draft_parts import Parts
from specctl.ops.load import located
from specctl.ops.report import finding


def write_map(parts: Parts, *, out: str, allow: tuple[str, ...], options: Options) -> ConvertReport:
    """Write the map of a draft to a JSON file; an equal file is left alone.

    Args:
        parts: the draft.
        out: the file.
        allow: names of accepted losses.
        options: how it is written; `--force` replaces another file.
    """
    content, own = gguf_map(parts.draft, parts.target)
    placed = located(own, parts.source, target=parts.target_source)
    found = judge_losses((*left_open(parts.diagnostics), *placed), allow)
    data, path = json_bytes(content), Path(out)
    if not has_errors(found):
        found = (*found, *_refusals(path, data, is_forced=options.is_forced))
    if has_errors(found):
        return refused(parts.source, parts.draft.format, GGUF_MAP, out, found)
    is_same = path.is_file() and path.read_bytes() == data
    if not options.is_dry_run and not is_same:
        _write(path, data)
    return ConvertReport(
        source=parts.source,
        source_format=parts.draft.format,
        written_format=GGUF_MAP,
        output=out,
        state="planned" if options.is_dry_run else "unchanged" if is_same else "written",
        files=(OutputFileFacts(file=path.name, size_bytes=len(data), num_tensors=0),),
        tensors=(),
        losses_allowed=losses_in(found),
        fixes=(),
        config_changes=(),
        renames=(),
        diagnostics=tuple(finding(d) for d in found),
    )


def _refusals(path: Path, data: bytes, *, is_forced: bool) -> list[Diagnostic]:
    if not path.exists() or (path.is_file() and (is_forced or path.read_bytes() == data)):
        return []
    return [
        diagnose(
            "SD603",
            where="--output",
            message=f"`{path}` exists and is not what this command writes",
            expected="a new file",
            found="a directory" if path.is_dir() else "another file",
        )
    ]


def _write(path: Path, data: bytes) -> None:
    try:
        with atomic_write(path) as stream:
            stream.write(data)
    except OSError as error:
        raise DiagnosticError(
            diagnose(
                "SD605",
                where="--output",
                message=f"`{path}` cannot be written: {error.strerror or error}",
            )
        ) from error
