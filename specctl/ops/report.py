"""What `inspect --json` and `validate --json` write: published keys, in this order, nothing else.

Invariants: every key is always present, null when there is no value; the JSON Schemas under
docs/reference/schemas/ are generated from these types, so a key is added here and never renamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import TensorRef
from specctl.contract.text import printable
from specctl.convert.fixes import safety_of


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all report values."""


class Finding(_Report, frozen=True, kw_only=True):
    """One diagnostic with its short name.

    Args:
        fixable: whether `normalize` repairs it: `safe`, `unsafe` (only under `--unsafe-fixes`), or
            null.
    """

    code: str
    severity: Literal["error", "warning", "info"]
    slug: str
    where: str
    message: str
    expected: str | None
    found: str | None
    help: str | None
    notes: tuple[str, ...]
    fixable: Literal["safe", "unsafe"] | None


class FindingLine(Finding, frozen=True, kw_only=True):
    """One line of `validate --format jsonl`: a finding, the source it was found in, and its place.

    Args:
        source: as in `ValidateResult`.
        file: file or directory of the place; null for an option.
        line: counted from 1; null when the place is no key of a JSON or YAML file.
        column: counted from 1 in code points; null with `line`.
    """

    source: str
    file: str | None
    line: int | None
    column: int | None


class Source(_Report, frozen=True, kw_only=True):
    """What one directory is.

    Args:
        path: as the user wrote it.
        revision: commit (ModelScope: branch or tag) of the files, null when nothing says so.
        role: `draft`, `target`, or null when unknown.
        format: dialect, null when unknown.
        target_name: target that a draft's config names, null when it names none.
        evidence: keys and names that decided it.
    """

    path: str
    revision: str | None
    role: Literal["draft", "target"] | None
    format: str | None
    architecture: str | None
    algorithm: str | None
    target_name: str | None
    evidence: tuple[str, ...]


class Roles(_Report, frozen=True, kw_only=True):
    """The inspected source and, with `--target`, the target it was compared with."""

    source: Source
    target: Source | None


class GeometryFacts(_Report, frozen=True, kw_only=True):
    """Widths of a round, null while open, and where the token count comes from."""

    num_speculative_tokens: int | None
    draft_width: int | None
    verify_width: int | None
    sample_from_anchor: bool | None
    draft_block_size: int | None
    decided_by: str | None


class VocabularyFacts(_Report, frozen=True, kw_only=True):
    """Vocabulary sizes and the map between them.

    Args:
        map_kind: `identity` or `reduced`; null while a size is open.
        map_tensor: d2t on disk.
        mask_tensor: t2d on disk.
        map_digest: digest over the absolute target ids in draft-id order.
        decided_by: how the stored map is read.
        tokenizer_size: entries of the target's tokenizer.
        eos_token_ids: end ids that the source names.
    """

    target_vocab_size: int | None
    draft_vocab_size: int | None
    map_kind: Literal["identity", "reduced"] | None
    map_tensor: TensorRef | None
    mask_tensor: TensorRef | None
    map_digest: str | None
    decided_by: str | None
    tokenizer_size: int | None
    eos_token_ids: tuple[int, ...]


class AuxHidden(_Report, frozen=True, kw_only=True):
    """Captured target states.

    Args:
        num_states: how many states the draft concatenates.
        numbering: what the ids in the file count, `boundary` or `output`.
        read_ids: the list as written, null when the file has none.
        output_layer_ids: 0-based, output of that layer, -1 = embedding output; null while open.
        decided_by: file or rule that the ids come from.
    """

    num_states: int | None
    numbering: Literal["boundary", "output"] | None
    read_ids: tuple[int, ...] | None
    output_layer_ids: tuple[int, ...] | None
    decided_by: str | None


class SharedTensor(_Report, frozen=True, kw_only=True):
    """Where an embedding or head comes from.

    Args:
        origin: `own` (a tensor of this source), `target` (the draft has none), `tied` (the
            target's embedding serves as head).
        tensor: null when it is the target's and no target was given.
    """

    origin: Literal["own", "target", "tied"]
    tensor: TensorRef | None


class SharingFacts(_Report, frozen=True, kw_only=True):
    """Where embedding and head come from; null when the source has none at all.

    Args:
        head_decided_by: of a target: the flag or the rule that says whether the head is tied.
        decoys: of a target: copies inside layers and draft parts that were passed over.
    """

    embedding: SharedTensor | None
    head: SharedTensor | None
    head_decided_by: str | None
    decoys: tuple[TensorRef, ...]


class BundledDraft(_Report, frozen=True, kw_only=True):
    """The prediction layers inside a target.

    Args:
        num_layers: prediction layers, null for a block draft.
        num_tensors: tensors of them, own copies of embedding and head included.
        embedding: key of an own copy, null when the target's embedding is used.
        head: the same for the head.
        details: what only this kind of draft has, by the reader's names.
    """

    format: str
    algorithm: str
    num_layers: int | None
    num_tensors: int
    num_bytes: int
    embedding: str | None
    head: str | None
    details: dict[str, Any]


class Part(_Report, frozen=True, kw_only=True):
    """Tensors that belong together, such as `layers` or `embedding`."""

    name: str
    num_tensors: int
    num_bytes: int


class Tensor(_Report, frozen=True, kw_only=True, gc=False):
    """One stored tensor and its canonical role, null when the format does not define it.

    Args:
        role: `bundled.` and a role for the draft inside a target; `trunk` for the layers of a
            target that is described in outline only.
    """

    key: str
    role: str | None
    file: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


class Tensors(_Report, frozen=True, kw_only=True):
    """Everything stored, by part and one by one."""

    num_tensors: int
    num_bytes: int
    num_files: int
    parts: tuple[Part, ...]
    list: tuple[Tensor, ...]


class EngineRow(_Report, frozen=True, kw_only=True):
    """One thing an engine is known to do with this draft.

    Args:
        name: of the rule.
        outcome: `loads`, `wrong` (loads and runs wrong, silently) or `refused`.
        versions: releases in whose sources it was read, in words.
        is_current: it holds in the newest release that was read.
        source: file, pull request or issue.
    """

    name: str
    outcome: Literal["loads", "wrong", "refused"]
    versions: str
    is_current: bool
    reason: str
    source: str


class EngineReport(_Report, frozen=True, kw_only=True):
    """What another engine does with this draft.

    Args:
        outcome: worst of the current rows; `loads` when nothing is known against it;
            `unknown` when nobody read how the engine loads such a draft.
        version: newest release whose sources were read.
        checked_on: everything that was read.
    """

    engine: str
    outcome: Literal["loads", "wrong", "refused", "unknown"]
    version: str
    checked_on: str
    rows: tuple[EngineRow, ...]


class InspectReport(_Report, frozen=True, kw_only=True):
    """The answer of `specctl inspect`.

    Args:
        engines: verdicts on a draft; empty for a target.
        details: what only a draft of this kind has, by the reader's names; empty for a target.
        bundled: of a target: the draft inside it, null without one.
    """

    format: str | None
    roles: Roles
    geometry: GeometryFacts | None
    vocabulary: VocabularyFacts
    aux_hidden: AuxHidden | None
    sharing: SharingFacts
    details: dict[str, Any]
    bundled: BundledDraft | None
    engines: tuple[EngineReport, ...]
    tensors: Tensors
    diagnostics: tuple[Finding, ...]


class ValidateResult(_Report, frozen=True, kw_only=True):
    """One validated source.

    Args:
        source: directory, manifest file or token map file.
        kind: what it is; null when unknown.
        target: the target it was compared with.
    """

    source: str
    kind: Literal["draft", "target", "manifest", "token_map"] | None
    format: str | None
    target: str | None
    diagnostics: tuple[Finding, ...]


class Mismatch(_Report, frozen=True, kw_only=True):
    """A fixture whose codes are not the expected ones; `problem` is one line."""

    source: str
    expected: tuple[str, ...] | None
    found: tuple[str, ...] | None
    problem: str


class ValidateReport(_Report, frozen=True, kw_only=True):
    """The answer of `specctl validate`.

    Args:
        num_ignored: findings that `--ignore` dropped.
        is_clean: exit status 0: no error and no warning, or under `--expect` no mismatch.
        mismatches: null without `--expect`.
    """

    results: tuple[ValidateResult, ...]
    num_errors: int
    num_warnings: int
    num_infos: int
    num_ignored: int
    is_clean: bool
    mismatches: tuple[Mismatch, ...] | None


def finding(diagnostic: Diagnostic, *, format: str | None = None) -> Finding:
    """Return the published form of a diagnostic; its place is text for any name of a directory.

    Args:
        diagnostic: what was found.
        format: of the draft it was found in, None where nothing can be normalized.
    """
    return Finding(
        code=diagnostic.code,
        severity=diagnostic.severity,
        slug=diagnostic.slug,
        where=printable(diagnostic.where),
        message=diagnostic.message,
        expected=diagnostic.expected,
        found=diagnostic.found,
        help=diagnostic.help,
        notes=diagnostic.notes,
        fixable=safety_of(diagnostic, format),
    )


def count_severities(findings: Iterable[Finding]) -> tuple[int, int, int]:
    """Return the numbers of errors, warnings and infos."""
    severities = [item.severity for item in findings]
    return severities.count("error"), severities.count("warning"), severities.count("info")


def diagnostic_of(item: Finding) -> Diagnostic:
    """Return the diagnostic that `finding` was made from."""
    return Diagnostic(
        code=item.code,
        severity=item.severity,
        where=item.where,
        message=item.message,
        expected=item.expected,
        found=item.found,
        help=item.help,
        notes=item.notes,
    )


_TITLES: dict[type[msgspec.Struct], str] = {
    InspectReport: "inspect --json",
    ValidateReport: "validate --format json",
    FindingLine: "validate --format jsonl, one line",
}


def json_schema(report: type, title: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a report; other keys than the listed ones are refused.

    Args:
        report: one of the types here, or a type of another module with its `title`; structs or
            dataclasses.
        title: what writes it, such as `convert --json`.
    """
    schema: dict[str, Any] = msgspec.json.schema(report)
    for definition in schema["$defs"].values():
        if definition.get("type") == "object" and "properties" in definition:
            definition["additionalProperties"] = False
    name = f"specctl {title or _TITLES[report]}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name} | schema
