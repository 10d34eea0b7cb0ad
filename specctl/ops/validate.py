"""Judge checkpoints and manifests: every finding of every source, and whether all is well.

Clean means: no error and no warning; infos are facts. Under a list of expectations it means: every
fixture gives exactly its codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from specctl.checkpoint import DEFAULT_ACCESS, Access, is_hub_source
from specctl.contract.codec import load_manifest, verify_digests, verify_places
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.text import printable
from specctl.ops.discover import Found, discover_all, is_pattern
from specctl.ops.expect import Expectations, compare, read_expectations
from specctl.ops.load import Loaded, fit, load, located, wrong_role
from specctl.ops.report import (
    ValidateReport,
    ValidateResult,
    count_severities,
    finding,
)
from specctl.ops.severity import USUAL, SeverityRules
from specctl.ops.token_map_check import check_token_map

if TYPE_CHECKING:
    from specctl.ops.deep import WeightStep

Step = Callable[[str], None]
Progress = Callable[[int], AbstractContextManager[Step]]


def _no_progress(total: int) -> AbstractContextManager[Step]:
    return nullcontext(lambda step: None)


def _no_reading(file: str, done: int, total: int) -> None:
    """Show no progress of reading weights."""


def validate(
    sources: Sequence[str],
    *,
    target: str | None = None,
    expect: str | None = None,
    engines: Sequence[str] = (),
    rules: SeverityRules = USUAL,
    access: Access = DEFAULT_ACCESS,
    deep: WeightStep | None = None,
    progress: Progress = _no_progress,
) -> ValidateReport:
    """Check every source and what lies below it.

    A target that cannot be opened, or is a draft, is a result of its own, and its drafts are
    checked alone.

    Args:
        sources: checkpoints or files of them, manifests, token maps, directories of them, or
            patterns.
        target: target that every draft is compared with.
        expect: list of expected codes; see `specctl.ops.expect`. One that cannot be read is the
            only result, with its findings (SD703 to SD707).
        engines: engines that must run every draft as it was trained (SD212, SD213).
        rules: severities of this run.
        access: what is allowed while sources are read.
        deep: told of the progress of reading all weights; None to read only those of fixtures
            that are expected so.
        progress: called with the number of sources; its context yields a function for each step.
    """
    expectations: Expectations = {}
    if expect is not None:
        try:
            expectations = read_expectations(Path(expect), sources)
        except DiagnosticError as error:
            judged = _Judged(source=expect, diagnostics=error.diagnostics)
            return _report([judged], rules, None, is_expected=False)
    found = discover_all(sources, listed=frozenset(expectations))
    targets: dict[str, Loaded | None] = {}
    results: list[_Judged] = []
    with progress(len(found)) as step:
        for item in found:
            entry = expectations.get(os.path.abspath(item.path))  # noqa: PTH100  (lexical)
            wanted = target if entry is None or entry.target is None else entry.target
            if wanted is not None and wanted not in targets:
                targets[wanted], problems = _open_target(wanted, access)
                if problems:
                    results.append(_Judged(source=wanted, diagnostics=problems))
            beside = None if wanted is None else targets[wanted]
            wants_deep = entry is not None and entry.deep
            reading = deep or (_no_reading if wants_deep else None)
            results.append(_judge(item, beside, engines, access, reading))
            step(item.path)
    return _report(results, rules, None if expect is None else expectations)


def _open_target(source: str, access: Access) -> tuple[Loaded | None, tuple[Diagnostic, ...]]:
    """Return a target, or None with the reason: it cannot be opened, or is a draft (SD201)."""
    try:
        loaded = load(source, access=access)
    except DiagnosticError as error:
        return None, error.diagnostics
    wrong = tuple(wrong_role(loaded, "target"))
    return (None, wrong) if wrong else (loaded, ())


def _unmatched(pattern: str) -> Diagnostic:
    return diagnose(
        "SD119",
        where=pattern,
        message="the pattern matches no checkpoint and no manifest",
        expected="config.json, weights or manifest.yaml among the matches",
        found="none",
        help="Check the pattern; `**` stands for any number of directories",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """A result before severities: the fields of `ValidateResult`."""

    source: str
    diagnostics: tuple[Diagnostic, ...]
    kind: Literal["draft", "target", "manifest", "token_map"] | None = None
    format: str | None = None
    target: str | None = None


def _judge(
    item: Found,
    target: Loaded | None,
    engines: Sequence[str],
    access: Access,
    deep: WeightStep | None,
) -> _Judged:
    if item.kind == "manifest":
        found = check_manifest_file(item.path, access=access)
        return _Judged(source=item.path, kind="manifest", diagnostics=found)
    if item.kind == "token_map":
        beside_map = None if target is None else target.target
        judged = check_token_map(item.path, beside_map)
        return _Judged(
            source=item.path,
            kind="token_map",
            target=None if target is None else target.source,
            diagnostics=judged.diagnostics,
        )
    if is_pattern(item.path) and not is_hub_source(item.path):
        return _Judged(source=item.path, diagnostics=(_unmatched(item.path),))
    try:
        loaded = load(item.path, access=access)
    except DiagnosticError as error:
        return _Judged(source=item.path, diagnostics=error.diagnostics)
    diagnostics, beside = loaded.diagnostics, None
    if loaded.draft is not None and target is not None:
        pair = fit(loaded, target)
        loaded, beside = pair.draft, target.target
        diagnostics = (*pair.diagnostics, *target.diagnostics)
    if deep is not None:
        from specctl.ops.deep import deep_findings  # weights are read for --deep only

        other = None if loaded.draft is None else target
        diagnostics = (*diagnostics, *deep_findings(loaded, other, deep))
    if loaded.draft is not None and engines:
        from specctl.ops.engines import engine_findings  # the table is read for --engine only

        verdicts = engine_findings(loaded.draft, beside, engines)
        diagnostics = (*diagnostics, *located(verdicts, loaded.source))
    return _Judged(
        source=item.path,
        kind=loaded.detection.role,
        format=loaded.detection.format,
        target=None if target is None or loaded.draft is None else target.source,
        diagnostics=diagnostics,
    )


def _report(
    judged: Sequence[_Judged],
    rules: SeverityRules,
    expectations: Expectations | None,
    *,
    is_expected: bool = True,
) -> ValidateReport:
    results = tuple(
        ValidateResult(
            source=item.source,
            kind=item.kind,
            format=item.format,
            target=item.target,
            diagnostics=tuple(
                finding(d, format=item.format) for d in rules.apply(item.diagnostics)
            ),
        )
        for item in judged
    )
    shown = [item for result in results for item in result.diagnostics]
    num_errors, num_warnings, num_infos = count_severities(shown)
    mismatches = None if expectations is None else compare(results, expectations)
    is_quiet = not num_errors and not num_warnings and is_expected
    return ValidateReport(
        results=tuple(map(_printable, results)),
        num_errors=num_errors,
        num_warnings=num_warnings,
        num_infos=num_infos,
        num_ignored=sum(len(item.diagnostics) for item in judged) - len(shown),
        is_clean=is_quiet if mismatches is None else not mismatches,
        mismatches=mismatches,
    )


def _printable(result: ValidateResult) -> ValidateResult:
    """Return the result with names that any terminal, JSON or XML document can hold."""
    target = None if result.target is None else printable(result.target)
    return msgspec.structs.replace(result, source=printable(result.source), target=target)


def check_manifest_file(path: str, *, access: Access = DEFAULT_ACCESS) -> tuple[Diagnostic, ...]:
    """Return the problems of a manifest file and of the files that it points to."""
    try:
        manifest = load_manifest(path)
    except DiagnosticError as error:
        return error.diagnostics
    directory = Path(path).parent
    sections = ("target", manifest.target), ("draft", manifest.draft)
    on_hubs = {f"manifest#/{n}/source" for n, s in sections if s and is_hub_source(s.source)}
    found = tuple(d for d in verify_digests(manifest, directory) if d.where not in on_hubs)
    found = found or verify_places(manifest, directory)
    if on_hubs:
        from specctl.ops.hub_manifest import check_hub_sources

        found += check_hub_sources(manifest, access)
    return tuple(
        msgspec.structs.replace(d, where=path + d.where.removeprefix("manifest"))
        if d.where.startswith("manifest#")
        else d
        for d in found
    )
