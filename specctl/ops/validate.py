"""Judge checkpoints and manifests: every finding of every source, and whether all is well.

Clean means: no error and no warning; infos are facts. Under a list of expectations it means: every
fixture gives exactly its codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import msgspec

from specctl.contract.codec import load_manifest, verify_digests, verify_places
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.ops.discover import Found, discover
from specctl.ops.expect import Expectations, compare, read_expectations
from specctl.ops.load import Loaded, fit, load
from specctl.ops.report import (
    Mismatch,
    ValidateReport,
    ValidateResult,
    count_severities,
    finding,
)

Step = Callable[[str], None]
Progress = Callable[[int], AbstractContextManager[Step]]


def _no_progress(total: int) -> AbstractContextManager[Step]:
    return nullcontext(lambda step: None)


def validate(
    sources: Sequence[str],
    *,
    target: str | None = None,
    expect: str | None = None,
    progress: Progress = _no_progress,
) -> ValidateReport:
    """Check every source and what lies below it.

    Args:
        sources: checkpoints, manifests, or directories of them.
        target: target that every draft is compared with.
        expect: list of expected codes; see `specctl.ops.expect`.
        progress: called with the number of sources; its context yields a function for each step.

    Raises:
        DiagnosticError: SD703 to SD707 (the list), SD119, SD120, SD135 (a target).
    """
    expectations: Expectations = {}
    if expect is not None:
        expectations = read_expectations(Path(expect), sources)
    listed = frozenset(expectations)
    found = {item.path: item for source in sources for item in discover(source, listed=listed)}
    targets: dict[str, Loaded] = {}
    results: list[ValidateResult] = []
    with progress(len(found)) as step:
        for item in found.values():
            entry = expectations.get(os.path.abspath(item.path))  # noqa: PTH100  (lexical)
            wanted = target if entry is None or entry.target is None else entry.target
            if wanted is not None and wanted not in targets:
                targets[wanted] = load(wanted)
            results.append(_validate_one(item, None if wanted is None else targets[wanted]))
            step(item.path)
    mismatches = None if expect is None else compare(results, expectations)
    return _report(results, mismatches)


def _report(
    results: list[ValidateResult], mismatches: tuple[Mismatch, ...] | None
) -> ValidateReport:
    num_errors, num_warnings, num_infos = count_severities(
        item for result in results for item in result.diagnostics
    )
    is_quiet = not num_errors and not num_warnings
    return ValidateReport(
        results=tuple(results),
        num_errors=num_errors,
        num_warnings=num_warnings,
        num_infos=num_infos,
        is_clean=is_quiet if mismatches is None else not mismatches,
        mismatches=mismatches,
    )


def _validate_one(item: Found, target: Loaded | None) -> ValidateResult:
    if item.kind == "manifest":
        return _result(item.path, "manifest", None, None, check_manifest_file(item.path))
    try:
        loaded = load(item.path)
    except DiagnosticError as error:
        return _result(item.path, None, None, None, error.diagnostics)
    if loaded.draft is None or target is None:
        role, kind = loaded.detection.role, loaded.detection.format
        return _result(item.path, role, kind, None, loaded.diagnostics)
    pair = fit(loaded, target)
    diagnostics = (*pair.diagnostics, *target.diagnostics)
    return _result(item.path, "draft", loaded.detection.format, target.source, diagnostics)


def _result(
    source: str,
    kind: Literal["draft", "target", "manifest"] | None,
    format: str | None,
    target: str | None,
    diagnostics: Iterable[Diagnostic],
) -> ValidateResult:
    return ValidateResult(
        source=source,
        kind=kind,
        format=format,
        target=target,
        diagnostics=tuple(finding(d) for d in diagnostics),
    )


def check_manifest_file(path: str) -> tuple[Diagnostic, ...]:
    """Return the problems of a manifest file and of the files that it points to."""
    try:
        manifest = load_manifest(path)
    except DiagnosticError as error:
        return error.diagnostics
    directory = Path(path).parent
    found = verify_digests(manifest, directory) or verify_places(manifest, directory)
    return tuple(
        msgspec.structs.replace(d, where=path + d.where.removeprefix("manifest"))
        if d.where.startswith("manifest#")
        else d
        for d in found
    )
