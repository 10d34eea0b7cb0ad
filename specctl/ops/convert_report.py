"""What `convert --json` and `normalize --json` write: published keys, in this order.

Invariants: as in `specctl.ops.report`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from specctl.contract.diagnostics import Diagnostic
from specctl.convert.engine import Plan
from specctl.convert.provenance import tensor_origin
from specctl.ops.report import Finding, finding


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all report values."""


class OutputFileFacts(_Report, frozen=True, kw_only=True):
    """One weight file of the output."""

    file: str
    size_bytes: int
    num_tensors: int


class OutputTensor(_Report, frozen=True, kw_only=True):
    """One tensor of the output and, in words, where its bytes come from."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    source: str


class ConfigChange(_Report, frozen=True, kw_only=True):
    """One field of config.json that `normalize` writes differently.

    Args:
        pointer: JSON pointer.
        before: JSON text, null when the field is new.
        after: JSON text, null when the field is dropped.
    """

    pointer: str
    before: str | None
    after: str | None


class Rename(_Report, frozen=True, kw_only=True):
    """One tensor whose key or file `normalize` changes; null where there is none."""

    before: str | None
    after: str | None


class ConvertReport(_Report, frozen=True, kw_only=True):
    """The answer of `specctl convert` and `specctl normalize`.

    Args:
        source: as the user wrote it.
        source_format: dialect that it was read in, null when unknown.
        written_format: dialect of the output.
        output: as the user wrote it.
        state: `written`; `unchanged` when the output was there, byte for byte; `planned` under
            `--dry-run`; `refused` when a finding is an error, and then nothing was written.
        losses_allowed: names given with `--allow` that apply.
        fixes: names of the fixes that `normalize` applied.
        config_changes: empty for `convert`.
        renames: empty for `convert`.
    """

    source: str
    source_format: str | None
    written_format: str | None
    output: str
    state: Literal["written", "unchanged", "planned", "refused"]
    files: tuple[OutputFileFacts, ...]
    tensors: tuple[OutputTensor, ...]
    losses_allowed: tuple[str, ...]
    fixes: tuple[str, ...]
    config_changes: tuple[ConfigChange, ...]
    renames: tuple[Rename, ...]
    diagnostics: tuple[Finding, ...]


def planned_report(
    plan: Plan,
    *,
    source: str,
    source_format: str,
    format: str,
    out: str,
    found: Iterable[Diagnostic],
) -> ConvertReport:
    """Return the report of a plan that is not carried out yet."""
    return ConvertReport(
        source=source,
        source_format=source_format,
        written_format=format,
        output=out,
        state="planned",
        files=_files(plan),
        tensors=_tensors(plan),
        losses_allowed=(),
        fixes=(),
        config_changes=(),
        renames=(),
        diagnostics=tuple(finding(d) for d in found),
    )


def refused(
    source: str,
    source_format: str | None,
    written_format: str | None,
    out: str,
    diagnostics: Iterable[Diagnostic],
) -> ConvertReport:
    """Return the report of a conversion that was not done."""
    return ConvertReport(
        source=source,
        source_format=source_format,
        written_format=written_format,
        output=out,
        state="refused",
        files=(),
        tensors=(),
        losses_allowed=(),
        fixes=(),
        config_changes=(),
        renames=(),
        diagnostics=tuple(finding(d) for d in diagnostics),
    )


def _files(plan: Plan) -> tuple[OutputFileFacts, ...]:
    return tuple(
        OutputFileFacts(file=file.name, size_bytes=file.size, num_tensors=len(file.tensors))
        for file in plan.layout.files
    )


def _tensors(plan: Plan) -> tuple[OutputTensor, ...]:
    return tuple(
        OutputTensor(
            key=key,
            file=file.name,
            dtype=source.dtype,
            shape=source.out_shape,
            source=tensor_origin(source),
        )
        for file in plan.layout.files
        for key, source in file.tensors.items()
    )
