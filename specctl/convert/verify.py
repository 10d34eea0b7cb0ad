"""Check a conversion: every tensor goes somewhere, and the result reads back with the same facts.

Invariants: a fact may be open in the result only when an allowed loss or a missing fact of the
source explains it; it is never another value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from specctl import checks, formats
from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.file_names import QUANTIZATION
from specctl.contract.manifest import TensorRef
from specctl.contract.roles import MAP_ROLES
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.formats.written import Copy, Joined, Rows, Span, TensorSource, Written

OPEN_FACTS = frozenset({"SD301", "SD303", "SD306"})
"""Errors that say only that a fact is open; a dialect without a field for it leaves it open."""

_FACTS = (
    "algorithm",
    "decoder",
    "hidden_size",
    "target_hidden_size",
    "target_vocab_size",
    "draft_vocab_size",
    "has_fc_bias",
    "has_norm_before_residual",
    "has_norm_before_fc",
    "has_fc_norm",
    "has_norm_output",
    "mask_token_id",
    "markov",
    "sample_from_anchor",
    "draft_block_size",
    "draft_to_target",
    "aux_layer_ids",
)
_CONFIDENCE = ("has_confidence_head", "is_confidence_with_markov")
_LOST_ROLES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "head": ("head",),
    "confidence-head": ("confidence.",),
    "gate": ("layers.",),
}


def unused_tensors(
    draft: DraftCheckpoint, written: Written, losses: Collection[str]
) -> tuple[str, ...]:
    """Return the roles whose tensors no written tensor takes and no loss explains, sorted."""
    taken = {
        (ref.file, ref.begin, ref.end)
        for source in written.tensors.values()
        for ref in refs_of(source)
    }
    excused = tuple(part for loss in losses for part in _LOST_ROLES.get(loss, ()))
    return tuple(
        sorted(
            role
            for role, ref in draft.tensors.items()
            if (ref.file, ref.begin, ref.end) not in taken
            and role not in MAP_ROLES
            and not (excused and role.startswith(excused))
        )
    )


def refs_of(source: TensorSource) -> Iterator[TensorRef]:
    """Yield the stored tensors that a written tensor takes bytes from."""
    if isinstance(source, Copy | Rows | Span):
        yield source.ref
    elif isinstance(source, Joined):
        yield from source.parts


def check_written(
    directory: Path,
    expected: DraftCheckpoint,
    format: str,
    losses: Collection[str],
    target: TargetCheckpoint | None = None,
) -> DraftCheckpoint:
    """Return a finished output as read again, compared with the facts it was written from.

    Args:
        directory: the output before it is renamed.
        expected: the facts that were written.
        format: that it must be detected as.
        losses: names of the losses that were allowed.
        target: decides captured layers that the dialect does not state.

    Raises:
        DiagnosticError: SD606 for another format or fact, with the errors of the result if any.
    """
    checkpoint = open_checkpoint(directory)
    detection = formats.detect(checkpoint)
    if detection.format != format:
        raise _differs("format", format, detection.format, detection.diagnostics)
    found = formats.read_draft(checkpoint, detection)
    if target is not None:
        found = formats.complete_draft(found, target)
    side = checkpoint.json_file(QUANTIZATION)
    files = checks.check_files(checkpoint, side=side)  # a scale must still fit its weight
    check_same_facts(expected, found, (*checkpoint.diagnostics, *files), losses=losses)
    return found


def check_same_facts(
    expected: DraftCheckpoint,
    found: DraftCheckpoint,
    container: Iterable[Diagnostic],
    *,
    losses: Collection[str],
) -> None:
    """Raise SD606 for facts that differ and errors that the source does not have.

    Args:
        expected: facts that were written.
        found: facts that were read again.
        container: findings of the written files.
        losses: names of the losses that were allowed.
    """
    findings = (*container, *found.diagnostics, *checks.check_draft(found))
    problems = [*_differences(expected, found, losses), *_new_errors(findings, expected)]
    if problems:
        raise DiagnosticError(problems)


def _differences(
    expected: DraftCheckpoint, found: DraftCheckpoint, losses: Collection[str]
) -> Iterator[Diagnostic]:
    names = _FACTS if "confidence-head" in losses else (*_FACTS, *_CONFIDENCE)
    for name in names:
        wanted, read = getattr(expected, name), getattr(found, name)
        if name == "aux_layer_ids" and "aux-layer-ids" in losses:
            continue  # engines take the default then, which is what the user allowed
        if name == "draft_to_target" and expected.map_kind == "identity":
            continue  # a map that says nothing
        if wanted != read:
            yield _difference(name, wanted, read)
    wanted_count = expected.geometry and expected.geometry.num_speculative_tokens
    read_count = found.geometry and found.geometry.num_speculative_tokens
    is_kept = "token-count" not in losses  # else a block dialect reads what the block offers
    if is_kept and wanted_count is not None and read_count not in (None, wanted_count):
        yield _difference("num_speculative_tokens", wanted_count, read_count)


def _new_errors(findings: Iterable[Diagnostic], expected: DraftCheckpoint) -> Iterator[Diagnostic]:
    known = {(d.code, d.message) for d in expected.diagnostics}
    for finding in findings:
        is_known = (finding.code, finding.message) in known
        if finding.severity == "error" and finding.code not in OPEN_FACTS and not is_known:
            yield diagnose(
                "SD606",
                where="--output",
                message=f"the written checkpoint has an error: {finding.oneline()}",
                expected=finding.expected,
                found=finding.found,
            )


def _difference(name: str, wanted: object, read: object) -> Diagnostic:
    return diagnose(
        "SD606",
        where="--output",
        message=f"`{name}` is not the same after reading the output again",
        expected=_shown(wanted),
        found=_shown(read),
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _differs(
    name: str, wanted: object, read: object, more: Iterable[Diagnostic]
) -> DiagnosticError:
    return DiagnosticError([_difference(name, wanted, read), *more])
