"""Say which format a checkpoint is in, from config and tensor names only.

Invariants: total and unique: every checkpoint gives one format, or no format and one error. The
path is never looked at (vLLM issues 42376 and 47486: methods guessed from directory names). Every
format is asked; there is no order. Two claims of which neither refines the other, or tensors of a
layout that the claiming format cannot hold, are a conflict, not a preference.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import CONFIG
from specctl.draft import Detection
from specctl.formats.format import Evidence, Format, gather_evidence
from specctl.formats.registry import FORMATS, LAYOUTS


def detect(checkpoint: Checkpoint) -> Detection:
    """Return role and format of a checkpoint, or the reason why there is none.

    Diagnostics: SD201 (unknown), SD202 (contradictory), SD205 (recognised, not read).
    """
    found = decide(gather_evidence(checkpoint, LAYOUTS))
    placed = tuple(
        msgspec.structs.replace(d, where=mark_place(d.where, checkpoint)) for d in found.diagnostics
    )
    return replace(found, diagnostics=placed)


def mark_place(mark: str, checkpoint: Checkpoint) -> str:
    """Return the place of a piece of evidence: a tensor with its file, or a config key."""
    name = mark.removeprefix("tensor ").split(" = ")[0]
    entry = checkpoint.tensors.get(name)
    return name if entry is None else entry.describe()


def decide(evidence: Evidence) -> Detection:
    """Return the one format that claims the evidence, or the conflict."""
    claims = [(entry, mark) for entry in FORMATS if (mark := entry.claim(evidence)) is not None]
    overruled = {name for entry, _ in claims for name in entry.refines}
    is_target = any(entry.role == "target" for entry, _ in claims)
    bundled = [
        entry
        for entry, _ in claims
        if entry.is_bundled and is_target and entry.name not in overruled
    ]
    standing = [
        (entry, mark)
        for entry, mark in claims
        if entry.name not in overruled and not (is_target and entry.is_bundled)
    ]
    if not standing:
        return _unclaimed(evidence)
    if standing[1:]:
        marks = [mark for _, mark in standing]
        names = " and ".join(f"{entry.title} ({mark})" for entry, mark in standing)
        return _failed("SD202", f"two formats claim it: {names}", marks)
    return _settled(*standing[0], evidence, bundled)


def _settled(entry: Format, mark: str, evidence: Evidence, bundled: list[Format]) -> Detection:
    strange = [key for name, key in evidence.layouts.items() if name not in entry.layouts]
    if strange:
        text = f"{mark} says {entry.title}, the tensors say otherwise: tensor {strange[0]}"
        return _failed("SD202", text, [mark, f"tensor {strange[0]}"])
    if bundled[1:]:
        names = " and ".join(form.title for form in bundled)
        return _failed("SD202", f"two kinds of bundled prediction layers: {names}", [mark])
    if entry.read is None and entry.role == "draft":
        return _failed("SD205", f"{mark}: {entry.title} is not read by this version", [mark])
    shown = evidence.layout_mark(*entry.layouts)
    return Detection(
        role=entry.role,
        format=entry.name,
        bundled=bundled[0].name if bundled else None,
        evidence=tuple(dict.fromkeys([mark, *([shown] if shown else [])])),
        diagnostics=(),
    )


def _unclaimed(evidence: Evidence) -> Detection:
    declared = evidence.config.get("speculators_model_type")
    if isinstance(declared, str):
        mark = f"{CONFIG}#/speculators_model_type = {declared}"
        return _failed(
            "SD205", f"Speculators type `{declared}` is not read by this version", [mark]
        )
    mark = f"{CONFIG}#/architectures/0 = {evidence.architecture}"
    if evidence.layouts:
        seen = [f"tensor {key}" for key in evidence.layouts.values()]
        return _failed("SD205", f"{seen[0]}, but the config does not say which format it is", seen)
    count = len(evidence.generic)
    return _failed(
        "SD201", f"none of the {count} forms of tensor names is of a known layout", [mark]
    )


def _failed(code: str, message: str, marks: list[str]) -> Detection:
    finding: Diagnostic = diagnose(
        code,
        where=marks[0],
        message=message,
        expected="one known layout",
        found=", ".join(marks),
    )
    return Detection(
        role=None, format=None, bundled=None, evidence=tuple(marks), diagnostics=(finding,)
    )
