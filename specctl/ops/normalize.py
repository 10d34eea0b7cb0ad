"""Write a draft again in its own dialect, in the canonical form: safe fixes, and what is set.

Invariants: idempotent. What no rule reads (unknown fields, tensors without a role) is kept unless
`--unsafe-fixes` drops it. Nothing is written while a finding that no fix settles is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from specctl import checks
from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.convert.engine import Plan
from specctl.convert.fixes import FIXES, config_changes, finite, get, put, restore, settled
from specctl.convert.layout import json_bytes, plan_layout
from specctl.convert.losses import judge_losses, losses_in, maps_left_out
from specctl.convert.provenance import provenance_record
from specctl.convert.settings import apply_settings, check_settings, parse_settings
from specctl.convert.side_files import side_files
from specctl.convert.verify import check_written, refs_of
from specctl.formats.names import as_ref
from specctl.formats.registry import BY_NAME
from specctl.formats.written import Copy, WriteRequest, Written
from specctl.ops.convert import (
    USUAL,
    Options,
    carry_out,
    left_open,
    unused,
)
from specctl.ops.convert_report import ConfigChange, ConvertReport, Rename, planned_report, refused
from specctl.ops.draft_parts import Parts, read_parts
from specctl.ops.given import NOTHING_GIVEN
from specctl.ops.load import located


def normalize(
    source: str,
    *,
    out: str,
    target: str | None = None,
    settings: tuple[str, ...] = (),
    is_unsafe: bool = False,
    options: Options = USUAL,
) -> ConvertReport:
    """Write the canonical form of a draft.

    Args:
        source: directory of a draft.
        out: directory to write.
        target: its target, which decides facts that the files leave open.
        settings: `NAME=VALUE` texts.
        is_unsafe: apply unsafe fixes too.
        options: how it is written.
    """
    try:
        facts = parse_settings(settings)
        parts = read_parts(source, target, NOTHING_GIVEN, access=options.access)
        if parts.is_bundled:
            raise DiagnosticError(_is_target(source))
    except DiagnosticError as error:
        return refused(source, None, None, out, error.diagnostics)
    parts = _with_settings(parts, facts)
    entry = BY_NAME[parts.draft.format]
    if entry.write is None:
        finding = _unwritten(source, parts.draft.format)
        return refused(source, entry.name, None, out, (finding,))
    fixed, kept = settled(parts.diagnostics, is_unsafe=is_unsafe)
    opened = tuple(left_open(kept))
    if has_errors(opened):
        return refused(source, entry.name, entry.name, out, opened)
    pending = tuple(d for d in kept if d.code in FIXES and FIXES[d.code].safety == "unsafe")
    request = WriteRequest(
        draft=parts.draft,
        target=parts.target,
        target_name=parts.draft.target_name,
        is_same_dialect=True,
    )
    written = _with_rest(entry.write(request), parts, pending)
    own = located(written.diagnostics, source, target=parts.target_source)
    # The source is of this dialect, so it has lost already what the dialect cannot hold.
    losses = losses_in(own)
    found = judge_losses((*opened, *own, *_notes(pending)), losses)
    if not has_errors(found):
        found = (*found, *unused(parts, written, losses))
    if has_errors(found):
        return refused(source, entry.name, entry.name, out, found)
    applied = tuple(sorted({FIXES[d.code].name for d in fixed}))
    plan = _plan(parts, written, facts, applied, found, options)

    def check(directory: Path) -> None:
        # A withheld fix leaves its finding; a fixed one must be gone.
        expected = replace(parts.draft, diagnostics=tuple(kept))
        read = check_written(directory, expected, entry.name, losses, parts.target)
        check_settings(facts, parts.draft, read)

    report = planned_report(
        plan,
        source=source,
        source_format=entry.name,
        format=entry.name,
        out=out,
        found=(*found, *located(maps_left_out(parts.draft, written), source)),
    )
    report = msgspec.structs.replace(
        report,
        fixes=applied,
        config_changes=tuple(
            ConfigChange(pointer=pointer, before=before, after=after)
            for pointer, before, after in config_changes(parts.draft.config, written.config)
        ),
        renames=tuple(_renames(plan, parts.checkpoints["draft"])),
    )
    return carry_out(plan, report, check=check, options=options)


def _with_settings(parts: Parts, facts: Mapping[str, Any]) -> Parts:
    if not facts:
        return parts
    before = {(d.code, d.message) for d in (*parts.draft.diagnostics,
                                            *checks.check_draft(parts.draft))}  # fmt: skip
    draft = apply_settings(parts.draft, facts)
    own = located((*draft.diagnostics, *checks.check_draft(draft)), parts.source)
    others = tuple(d for d in parts.diagnostics if (d.code, d.message) not in before)
    return replace(parts, draft=draft, diagnostics=(*others, *own))


def _with_rest(written: Written, parts: Parts, pending: tuple[Diagnostic, ...]) -> Written:
    """Return what the writer wrote, with what unapplied fixes leave alone."""
    draft, codes = parts.draft, {d.code for d in pending}
    config = restore(
        written.config, draft.config, (f for code in sorted(codes) for f in FIXES[code].fields)
    )
    if "SD211" in codes:
        for pointer in draft.unknown_fields:
            put(config, pointer, get(draft.config, pointer))
    tensors = dict(written.tensors)
    stored = parts.checkpoints["draft"].tensors
    if "SD502" in codes:
        taken = {ref.key for source in tensors.values() for ref in refs_of(source)}
        for key in draft.unmapped:
            if key not in taken and key not in tensors:
                tensors[key] = Copy(ref=as_ref(stored[key]))
    return replace(written, config=finite(config), tensors=tensors)


def _notes(pending: tuple[Diagnostic, ...]) -> list[Diagnostic]:
    return [
        diagnose(
            "SD608",
            where=item.where,
            message=f"{item.code} {item.slug} has an unsafe fix: {FIXES[item.code].text}",
            expected="--unsafe-fixes",
            found="not applied",
        )
        for item in pending
    ]


def _plan(
    parts: Parts,
    written: Written,
    facts: Mapping[str, Any],
    fixes: tuple[str, ...],
    found: tuple[Diagnostic, ...],
    options: Options,
) -> Plan:
    record = provenance_record(
        parts.checkpoints,
        command="normalize",
        source_format=parts.draft.format,
        written_format=parts.draft.format,
        given={f"--set {name}": value for name, value in facts.items()},
        diagnostics=found,
        fixes=fixes,
    )
    names = parts.checkpoints["draft"].file_names
    return Plan(
        checkpoints=parts.checkpoints,
        config=json_bytes(dict(written.config)),
        layout=plan_layout(written.tensors, max_shard_bytes=options.max_shard_bytes),
        side_files=side_files(written, names, origin="draft", is_bundled=False),
        record=record,
    )


def _renames(plan: Plan, checkpoint: Checkpoint) -> list[Rename]:
    """Return the tensors whose key or file changes, that are dropped or new."""
    rows: list[Rename] = []
    taken: set[str] = set()
    for file in plan.layout.files:
        for key, source in file.tensors.items():
            after = f"{file.name}::{key}"
            keys = [ref.key for ref in refs_of(source)]
            taken.update(keys)
            before = None
            if keys and keys[0] in checkpoint.tensors:
                before = f"{checkpoint.tensors[keys[0]].file}::{keys[0]}"
            if before != after:
                rows.append(Rename(before=before, after=after))
    dropped = sorted(set(checkpoint.tensors) - taken)
    rows += [Rename(before=f"{checkpoint.tensors[k].file}::{k}", after=None) for k in dropped]
    return sorted(rows, key=lambda row: (row.before or "", row.after or ""))


def _is_target(source: str) -> Diagnostic:
    return diagnose(
        "SD201",
        where=f"{source}/config.json#",
        message="this is a target with prediction layers; `normalize` writes drafts",
        expected="a draft",
        found="a target",
        help=f"Extract the draft: `specctl convert {source} --to speculators -o OUT`",
    )


def _unwritten(source: str, name: str) -> Diagnostic:
    return diagnose(
        "SD602",
        where=f"{source}/config.json#",
        message=f"`{name}` is read and cannot be written",
        expected="a dialect with a writer; `specctl convert --to help` lists them",
        found=name,
    )
