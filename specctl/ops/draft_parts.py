"""Read the draft that `convert` and `normalize` write, with the facts that target and user add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specctl import checks
from specctl.checkpoint import DEFAULT_ACCESS, Access, Checkpoint
from specctl.checks.quantization import Stored, check_quantization
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.file_names import QUANTIZATION
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.formats.written import Origin
from specctl.ops.given import Given, overridden_count, overridden_layers
from specctl.ops.load import Loaded, file_findings, fit, load, located, refit


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A draft to write, with its target if there is one.

    Args:
        source: as the user wrote it.
        checkpoints: by origin; a bundled draft's target is its own checkpoint.
        is_bundled: the draft was read out of a target.
        target_source: as the user wrote it, None without a target.
        diagnostics: of draft and pair.
    """

    source: str
    draft: DraftCheckpoint
    target: TargetCheckpoint | None
    checkpoints: Mapping[Origin, Checkpoint]
    is_bundled: bool
    target_source: str | None
    diagnostics: tuple[Diagnostic, ...]


def read_parts(
    source: str, target: str | None, given: Given, *, access: Access = DEFAULT_ACCESS
) -> Parts:
    """Return the draft of a source with the facts that target and user add.

    Args:
        source: directory of a draft, or of a target with prediction layers.
        target: directory of the target; SD805 when the source is a target itself.
        given: facts that the user states; SD713 where the files state others.
        access: what is allowed while sources are read.

    Raises:
        DiagnosticError: there is no draft, or the target is none.
    """
    loaded = load(source, access=access)
    if loaded.bundled is not None and loaded.target is not None:
        return _bundled_parts(loaded, loaded.bundled, given, target)
    if loaded.draft is None:
        raise DiagnosticError(_no_draft(loaded))
    if target is None:
        draft = given.added_to(loaded.draft)
        findings = _judged(loaded, draft, file_findings(loaded.checkpoint, draft))
        notes = _overridden(source, loaded.draft, draft, given)
        return _parts(loaded, draft, (*located(findings, source), *notes))
    other = load(target, access=access)
    pair = fit(loaded, other)
    if pair.draft.draft is None or other.target is None:
        raise DiagnosticError([d for d in pair.diagnostics if d.severity != "info"])
    draft = given.added_to(pair.draft.draft)
    notes = _overridden(source, pair.draft.draft, draft, given)
    return _parts(loaded, draft, (*refit(loaded, other, draft).diagnostics, *notes), other)


def _overridden(
    source: str, old: DraftCheckpoint, new: DraftCheckpoint, given: Given
) -> tuple[Diagnostic, ...]:
    return (*overridden_layers(source, old, new), *overridden_count(source, old, given))


def _judged(
    loaded: Loaded, draft: DraftCheckpoint, files: Iterable[Diagnostic]
) -> tuple[Diagnostic, ...]:
    own = (*draft.diagnostics, *checks.check_draft(draft))
    return (*loaded.checkpoint.diagnostics, *loaded.detection.diagnostics, *own, *files)


def _slice_errors(loaded: Loaded, bundled: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield the errors of quantised prediction layers; the trunk's are no matter of the draft."""
    keys = {ref.key for ref in bundled.tensors.values()}
    stored = Stored(
        config=loaded.checkpoint.config or {},
        side=loaded.checkpoint.json_file(QUANTIZATION),
        tensors={key: entry for key, entry in loaded.checkpoint.tensors.items() if key in keys},
        draft_keys=frozenset(),
    )
    yield from (d for d in check_quantization(stored) if d.severity == "error")


def _parts(
    loaded: Loaded,
    draft: DraftCheckpoint,
    findings: tuple[Diagnostic, ...],
    other: Loaded | None = None,
) -> Parts:
    checkpoints: dict[Origin, Checkpoint] = {"draft": loaded.checkpoint}
    if other is not None:
        checkpoints["target"] = other.checkpoint
    return Parts(
        source=loaded.source,
        draft=draft,
        target=None if other is None else other.target,
        checkpoints=checkpoints,
        is_bundled=False,
        target_source=None if other is None else other.source,
        diagnostics=findings,
    )


def _bundled_parts(
    loaded: Loaded, bundled: DraftCheckpoint, given: Given, target: str | None
) -> Parts:
    draft = given.added_to(bundled)
    findings = located(_judged(loaded, draft, _slice_errors(loaded, draft)), loaded.source)
    notes = [*_overridden(loaded.source, bundled, draft, given), *_idle_target(loaded, target)]
    return Parts(
        source=loaded.source,
        draft=draft,
        target=loaded.target,
        checkpoints={"draft": loaded.checkpoint, "target": loaded.checkpoint},
        is_bundled=True,
        target_source=loaded.source,
        diagnostics=(*findings, *notes),
    )


def _idle_target(loaded: Loaded, target: str | None) -> Iterator[Diagnostic]:
    """Yield SD805 for a target beside a source that is one itself."""
    if target is not None and target != loaded.source:
        yield diagnose(
            "SD805",
            where="--target",
            message=f"`{loaded.source}` is a target itself, and its prediction layers are read "
            f"with it; `{target}` was not opened",
            expected="no --target",
            found=target,
            help="Leave `--target` out; `--stitch-into` puts these layers into another target",
        )


def _no_draft(loaded: Loaded) -> tuple[Diagnostic, ...]:
    if loaded.detection.role != "target":
        return tuple(d for d in loaded.diagnostics if d.severity != "info")
    finding = diagnose(
        "SD201",
        where=f"{loaded.source}/config.json#",
        message="this is a target without prediction layers; there is no draft to convert",
        expected="a draft, or a target with one",
        found="target",
    )
    return (*(d for d in loaded.diagnostics if d.severity == "error"), finding)
