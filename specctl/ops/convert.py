"""Write a draft in another dialect: read, ask the dialect's writer, judge the losses, write.

Invariants: nothing is written while a finding is an error. A finding that only says that a fact is
open (SD301, SD303, SD306) is left to the writer, which reports what its dialect needs. A loss is an
error until the user names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from specctl.checkpoint import DEFAULT_ACCESS, Access
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.convert.dialects import find_dialect
from specctl.convert.engine import Plan, write
from specctl.convert.fixes import finite
from specctl.convert.layout import DEFAULT_SHARD_BYTES, json_bytes, plan_layout
from specctl.convert.losses import (
    general_losses,
    hints_lost,
    judge_losses,
    losses_in,
    maps_left_out,
)
from specctl.convert.provenance import provenance_record
from specctl.convert.reading import Moved
from specctl.convert.shared import settle_shared
from specctl.convert.side_files import side_files
from specctl.convert.verify import OPEN_FACTS, check_written, unused_tensors
from specctl.convert.vocabulary import adopted, full, lacks_map, reduced
from specctl.formats.format import Format
from specctl.formats.written import WriteRequest, Written
from specctl.ops.convert_report import ConvertReport, planned_report, refused
from specctl.ops.draft_parts import Parts, read_parts
from specctl.ops.given import NOTHING_GIVEN, Given
from specctl.ops.load import located
from specctl.ops.report import finding
from specctl.tokenmap.files import read_token_map

_SETTLED_BY_LOSS = frozenset({"SD502"})  # `unmapped-tensors` says the same, and can be allowed


def _no_bytes(count: int) -> None:
    return


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How an output is written.

    Args:
        max_shard_bytes: a larger output is written in shards.
        is_forced: replace a directory that specctl wrote.
        is_dry_run: plan only.
        has_digests: take the digest of every tensor.
        moved: told the bytes that were read.
        access: what is allowed while sources are read.
    """

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    is_forced: bool = False
    is_dry_run: bool = False
    has_digests: bool = True
    moved: Moved = _no_bytes
    access: Access = DEFAULT_ACCESS


USUAL = Options()


def convert(
    source: str,
    *,
    to: str,
    out: str,
    target: str | None = None,
    given: Given = NOTHING_GIVEN,
    allow: tuple[str, ...] = (),
    is_full_vocabulary: bool = False,
    options: Options = USUAL,
) -> ConvertReport:
    """Write a draft, or the prediction layers of a target, in another dialect.

    Args:
        source: directory of a draft, or of a target with prediction layers.
        to: dialect, a name of `specctl.convert.dialects`.
        out: directory to write.
        target: directory of the target, where the dialect or an open fact needs it.
        given: facts that the user states; a token map is what the head is cut to.
        allow: names of the losses that are accepted.
        is_full_vocabulary: give a cut draft the target's full head again.
        options: how it is written.
    """
    try:
        parts = read_parts(source, target, given, access=options.access)
        entry = find_dialect(to, parts.draft.algorithm)
        parts, transform = _other_vocabulary(parts, given.token_map, is_full=is_full_vocabulary)
    except DiagnosticError as error:
        return refused(source, None, None, out, error.diagnostics)
    given_facts = given.by_option() | {"--full-vocabulary": is_full_vocabulary or None}
    return write_draft(
        parts,
        entry,
        out=out,
        target_name=given.target_name,
        given=given_facts,
        allow=allow,
        options=options,
        transform=transform,
    )


def _other_vocabulary(
    parts: Parts, token_map: str | None, *, is_full: bool
) -> tuple[Parts, Callable[[Written], Written]]:
    draft, target, findings = parts.draft, parts.target, parts.diagnostics
    if token_map is not None:
        ids = read_map(token_map, target_vocab_size=draft.target_vocab_size)
        if lacks_map(draft):
            changed = adopted(draft, target, ids)
            findings = tuple(d for d in findings if d.code != "SD401")  # answered by the map
        else:
            changed = reduced(draft, target, ids)
    elif is_full:
        changed = full(draft, target, parts.checkpoints)
    else:
        return parts, lambda written: written
    diagnostics = (*findings, *changed.diagnostics)
    return replace(parts, draft=changed.draft, diagnostics=diagnostics), changed.apply


def read_map(path: str, *, target_vocab_size: int | None) -> tuple[int, ...]:
    """Return the ids of a token map file.

    Raises:
        DiagnosticError: SD402, SD404 or SD420, with a place that starts at the file's directory.
    """
    try:
        return read_token_map(path, target_vocab_size=target_vocab_size)
    except DiagnosticError as error:
        raise DiagnosticError(located(error.diagnostics, str(Path(path).parent))) from error


def write_draft(
    parts: Parts,
    entry: Format,
    *,
    out: str,
    target_name: str | None,
    given: Mapping[str, object],
    allow: tuple[str, ...],
    options: Options,
    transform: Callable[[Written], Written] = lambda written: written,
) -> ConvertReport:
    """Write a draft through a format's writer and report what was done.

    Args:
        parts: the draft.
        entry: format to write; it has a writer.
        out: directory to write.
        target_name: hub id or path to record as the target; None: as the draft names it.
        given: option -> value, for the provenance.
        allow: names of accepted losses.
        options: how it is written.
        transform: changes what the writer returned, such as rows gathered from a head.
    """
    if entry.write is None:
        raise ValueError(f"`{entry.name}` has no writer")
    opened = tuple(left_open(parts.diagnostics))
    if has_errors(opened):  # a writer may rely on what the reader found complete
        return refused(parts.source, parts.draft.format, entry.name, out, opened)
    name = target_name or parts.draft.target_name or parts.target_source
    request = WriteRequest(draft=parts.draft, target=parts.target, target_name=name)
    written = transform(entry.write(request))
    lost = settle_shared(written.diagnostics, parts.draft, parts.target, parts.checkpoints)
    own = located(
        (*lost, *general_losses(parts.draft)),
        parts.source,
        target=parts.target_source,
    )
    found = judge_losses((*opened, *own), allow)
    losses = losses_in(found)
    if not has_errors(found):
        found = (*found, *unused(parts, written, losses))
    if has_errors(found):
        return refused(parts.source, parts.draft.format, entry.name, out, found)
    plan = _plan(parts, entry, written, given=given, found=found, options=options)

    def check(directory: Path) -> None:
        check_written(directory, parts.draft, entry.name, losses, parts.target)

    hints = (
        *hints_lost(parts.draft, written.config, target_name=name),
        *maps_left_out(parts.draft, written),
    )
    report = planned_report(
        plan,
        source=parts.source,
        source_format=parts.draft.format,
        format=entry.name,
        out=out,
        found=(*found, *located(hints, parts.source)),
    )
    report = msgspec.structs.replace(report, losses_allowed=losses)
    return carry_out(plan, report, check=check, options=options)


def _plan(
    parts: Parts,
    entry: Format,
    written: Written,
    *,
    given: Mapping[str, object],
    found: tuple[Diagnostic, ...],
    options: Options,
) -> Plan:
    """Return what the directory holds: config, tensors, side files, and where all of it is from."""
    return Plan(
        checkpoints=parts.checkpoints,
        config=json_bytes(finite(written.config)),
        layout=plan_layout(written.tensors, max_shard_bytes=options.max_shard_bytes),
        side_files=side_files(
            written,
            parts.checkpoints["draft"].file_names,
            origin="draft",
            is_bundled=parts.is_bundled,
        ),
        record=provenance_record(
            parts.checkpoints,
            command="convert",
            source_format=parts.draft.format,
            written_format=entry.name,
            given=given,
            diagnostics=found,
        ),
    )


def carry_out(
    plan: Plan, report: ConvertReport, *, check: Callable[[Path], None], options: Options
) -> ConvertReport:
    """Write a plan unless this is a dry run; return the report with what became of it."""
    if options.is_dry_run:
        return report
    try:
        outcome = write(
            plan,
            Path(report.output),
            is_forced=options.is_forced,
            has_digests=options.has_digests,
            check=check,
            moved=options.moved,
        )
    except DiagnosticError as error:
        more = tuple(finding(d) for d in error.diagnostics)
        return msgspec.structs.replace(
            report,
            state="refused",
            files=(),
            tensors=(),
            diagnostics=(*report.diagnostics, *more),
        )
    return msgspec.structs.replace(report, state=outcome.state)


def left_open(diagnostics: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield findings with those as infos that the writer, or a named loss, decides.

    A guess is a warning and stays one: what is written states it as a fact.
    """
    for item in diagnostics:
        is_open = item.code in OPEN_FACTS and item.severity == "error"
        is_left = is_open or item.code in _SETTLED_BY_LOSS
        yield msgspec.structs.replace(item, severity="info") if is_left else item


def unused(parts: Parts, written: Written, losses: tuple[str, ...]) -> Iterator[Diagnostic]:
    for role in unused_tensors(parts.draft, written, losses):
        ref = parts.draft.tensors[role]
        yield diagnose(
            "SD602",
            where=f"{parts.source}/{ref.file}::{ref.key}",
            message=f"the dialect's writer has no place for `{ref.key}` (role `{role}`)",
            expected="every tensor written, or a named loss",
            found="a tensor left over",
        )
