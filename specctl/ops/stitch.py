"""Put prediction layers into a target: what changes, written as a whole target of its own.

Invariants: only tensors that the draft holds are replaced or added; the result is read again before
it appears, and holds the draft's facts inside the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from specctl import formats
from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.file_names import CONFIG
from specctl.convert.engine import Plan
from specctl.convert.provenance import provenance_record
from specctl.convert.shared import is_copy
from specctl.convert.stitch import stitched_config, stitched_layout, target_side_files
from specctl.convert.verify import check_same_facts, unused_tensors
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.formats.mtp.merge import Merge, merge
from specctl.formats.mtp.naming import role_names
from specctl.formats.written import Origin, Written
from specctl.ops.convert import (
    USUAL,
    Options,
    carry_out,
    left_open,
)
from specctl.ops.convert_report import ConvertReport, planned_report, refused
from specctl.ops.draft_parts import read_parts
from specctl.ops.given import NOTHING_GIVEN
from specctl.ops.load import Loaded, load, located


def stitch(source: str, into: str, *, out: str, options: Options = USUAL) -> ConvertReport:
    """Write a target with the prediction layers of a draft.

    Args:
        source: directory of the layers, or of another target that has them.
        into: directory of the target.
        out: directory to write; no file of the target is changed.
        options: how it is written; digests are taken of nothing, as the rest is copied whole.
    """
    try:
        parts = read_parts(source, None, NOTHING_GIVEN, access=options.access)
        loaded = load(into, access=options.access)
        target = _target(loaded)
    except DiagnosticError as error:
        return refused(source, None, None, out, error.diagnostics)
    checkpoints = {**parts.checkpoints, "target": loaded.checkpoint}
    change = merge(
        parts.draft,
        loaded.checkpoint,
        depth=target.num_layers,
        is_copy=lambda role: _is_copy(role, parts.draft, target, checkpoints),
    )
    findings = [
        *left_open(parts.diagnostics),
        *located(loaded.checkpoint.diagnostics, into),
        *located((*change.diagnostics, *_widths(parts.draft, target)), source, target=into),
        *_other_layers(parts.draft, loaded, change),
        *located(_without_place(parts.draft, change), source),
    ]
    if has_errors(findings):
        return refused(source, parts.draft.format, None, out, findings)
    record = provenance_record(
        checkpoints,
        command="stitch",
        source_format=parts.draft.format,
        written_format=loaded.detection.format,
        given={},
        diagnostics=findings,
    )
    plan = Plan(
        checkpoints=checkpoints,
        config=stitched_config(loaded.checkpoint, change.count_pointer, change.count),
        layout=stitched_layout(loaded.checkpoint, change.tensors),
        side_files=target_side_files(loaded.checkpoint),
        record=record,
    )

    def check(directory: Path) -> None:
        _check(directory, parts.draft, loaded)

    report = planned_report(
        plan,
        source=source,
        source_format=parts.draft.format,
        format=loaded.detection.format or "",
        out=out,
        found=findings,
    )
    changed = tuple(tensor for tensor in report.tensors if tensor.key in change.tensors)
    report = msgspec.structs.replace(report, tensors=changed)
    return carry_out(plan, report, check=check, options=replace(options, has_digests=False))


def _target(loaded: Loaded) -> TargetCheckpoint:
    if loaded.target is not None and loaded.checkpoint.container == "safetensors":
        return loaded.target
    finding = diagnose(
        "SD201",
        where=f"{loaded.source}/config.json#",
        message="`--stitch-into` needs a target in safetensors files",
        expected="a target",
        found=loaded.detection.role or "nothing known",
    )
    raise DiagnosticError([finding, *(d for d in loaded.diagnostics if d.severity == "error")])


def _is_copy(
    role: str,
    draft: DraftCheckpoint,
    target: TargetCheckpoint,
    checkpoints: Mapping[Origin, Checkpoint],
) -> bool:
    other = target.embedding if role_names(role)[1] == "embedding" else target.head
    return other is not None and is_copy(draft.tensors[role], other, checkpoints)


def _without_place(draft: DraftCheckpoint, change: Merge) -> list[Diagnostic]:
    """Return SD611 for tensors of the layers that the target's layout has no name for."""
    if not change.tensors:
        return []  # refused already
    written = Written(config={}, tensors=change.tensors)
    return [
        diagnose(
            "SD611",
            where=f"{draft.tensors[role].file}::{draft.tensors[role].key}",
            message=f"`{draft.tensors[role].key}` has no place among the target's layers",
            expected="every tensor of the layers in the target",
            found="a tensor left over",
        )
        for role in unused_tensors(draft, written, ())
        if role not in change.left_out
    ]


def _other_layers(draft: DraftCheckpoint, loaded: Loaded, change: Merge) -> list[Diagnostic]:
    """Return SD611 when the target has layers of another layout, beside which these would stand."""
    if loaded.detection.bundled is None or change.replaced or has_errors(change.diagnostics):
        return []
    return [
        diagnose(
            "SD611",
            where=f"{loaded.source}#/tensors",
            message=f"the target has layers in the layout `{loaded.detection.bundled}`, and these "
            f"are in `{draft.format}`",
            expected=loaded.detection.bundled,
            found=draft.format,
        )
    ]


def _widths(draft: DraftCheckpoint, target: TargetCheckpoint) -> list[Diagnostic]:
    pairs = (
        ("hidden size", draft.hidden_size, target.hidden_size),
        ("target vocabulary", draft.target_vocab_size, target.declared_vocab_size),
    )
    return [
        diagnose(
            "SD611",
            where=CONFIG,
            message=f"the layers have another {name} than the target",
            expected=right,
            found=left,
        )
        for name, left, right in pairs
        if left is not None and right is not None and left != right
    ]


def _check(directory: Path, draft: DraftCheckpoint, loaded: Loaded) -> None:
    """Raise unless the written target reads as before, with the draft's facts inside.

    Raises:
        DiagnosticError: SD606, SD611.
    """
    checkpoint = open_checkpoint(directory)
    detection = formats.detect(checkpoint)
    found = None if detection.bundled is None else formats.read_draft(checkpoint, detection)
    if found is None or detection.format != loaded.detection.format:
        raise DiagnosticError(
            diagnose(
                "SD606",
                where="--output",
                message="the written target is not read as one with prediction layers",
                expected=loaded.detection.format,
                found=detection.format,
            )
        )
    try:
        check_same_facts(draft, found, checkpoint.diagnostics, losses=("embedding", "head"))
    except DiagnosticError as error:  # the target's config describes other layers
        raise DiagnosticError(
            [
                msgspec.structs.replace(
                    diagnose("SD611", where=item.where, message=f"in the target: {item.message}"),
                    expected=item.expected,
                    found=item.found,
                )
                for item in error.diagnostics
            ]
        ) from error
