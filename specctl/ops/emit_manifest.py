"""Write down a target and its draft: every fact of a manifest with its origin, or a refusal.

Invariants: nothing is guessed. A fact is read, follows from a named rule, or is given by the user;
a given fact wins and, where the file says otherwise, is reported (SD713). Any error refuses the
whole manifest. The result passes its own checks and is read back equal. Of weights, a few rows of a
reduced head and of the target's are read (SD532).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specctl import __version__
from specctl.checkpoint import DEFAULT_ACCESS, Access, is_hub_source
from specctl.contract.consistency import check_manifest
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.fingerprint import fingerprint
from specctl.contract.manifest import (
    SCHEMA_VERSION,
    AcceptedDiagnostic,
    Draft,
    Geometry,
    Graphs,
    Manifest,
    Origin,
    Sampling,
    Sharing,
)
from specctl.draft import AuxNumbering, DraftCheckpoint, TargetCheckpoint
from specctl.ops.given import Given, overridden_layers
from specctl.ops.load import Loaded, Pair, fit, load, refit, wrong_role
from specctl.ops.manifest_sections import (
    NO_DRAFT_GEOMETRY,
    NO_DRAFT_ORIGINS,
    RULE_ORIGINS,
    TARGET_ROWS,
    kept_origins,
    parallel_section,
    portable_path,
    vocabulary_section,
)
from specctl.ops.not_served import (
    activation_not_served,
    draft_not_served,
    quantised_not_served,
    target_not_served,
)
from specctl.ops.token_map_file import TokenMap, read_token_map

DEFAULT_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """A manifest and the findings, none of them an error, with which it was written."""

    manifest: Manifest
    diagnostics: tuple[Diagnostic, ...]


def emit_manifest(
    target: str,
    draft: str | None,
    *,
    manifest_dir: Path | None = None,
    token_map: str | None = None,
    num_speculative_tokens: int | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    aux_numbering: AuxNumbering | None = None,
    access: Access = DEFAULT_ACCESS,
) -> Manifest:
    """Return the manifest of a target, with or without a draft; see `build_manifest`.

    Args:
        target: directory of the target.
        draft: directory of the draft, None for a target-only manifest.
        manifest_dir: where the file will stand; sources inside it become relative paths.
        token_map: file of allowed target ids.
        num_speculative_tokens: draft tokens for each round.
        aux_layer_ids: captured layers, counted as `aux_numbering` says (default: `output`).
        aux_numbering: what the ids count.
        access: what is allowed while the sources are read.

    Raises:
        DiagnosticError: every finding, when one of them is an error.
    """
    given = Given(
        token_map=token_map,
        num_speculative_tokens=num_speculative_tokens,
        aux_layer_ids=None if aux_layer_ids is None else tuple(aux_layer_ids),
        aux_numbering=aux_numbering,
    )
    return build_manifest(
        target, draft, given=given, manifest_dir=manifest_dir, access=access
    ).manifest


def build_manifest(
    target: str,
    draft: str | None,
    *,
    given: Given,
    manifest_dir: Path | None = None,
    access: Access = DEFAULT_ACCESS,
) -> Emission:
    """Return the manifest and its warnings.

    Args:
        target: directory of the target.
        draft: directory of the draft, None for a target-only manifest.
        given: what the user states.
        manifest_dir: where the file will stand; the current directory when None.
        access: what is allowed while the sources are read.

    Raises:
        DiagnosticError: every finding, when one of them is an error.
    """
    directory = (manifest_dir or Path.cwd()).resolve()
    loaded = load(target, access=access)
    if draft is None:
        findings: list[Diagnostic] = [*loaded.diagnostics, *_unused(given)]
        facts = _need_target(loaded, findings)
        revision = loaded.checkpoint.revision
        parts = _Parts(target=facts, target_source=target, target_revision=revision)
        return _assemble(parts, directory, findings)
    pair = fit(load(draft, access=access), loaded)
    if pair.draft.draft is None or loaded.target is None:
        raise _refusal([*loaded.diagnostics, *pair.diagnostics])
    token_map, problems = None, list[Diagnostic]()
    if given.token_map is not None:
        token_map, problems = read_token_map(
            given.token_map, draft=pair.draft.draft, target=loaded.target
        )
    pair, notes = _with_given(pair, pair.draft.draft, given, token_map)
    rows = _map_rows(pair)
    findings = [*loaded.diagnostics, *pair.diagnostics, *rows, *notes, *problems]
    parts = _Parts(
        target=loaded.target,
        target_source=target,
        target_revision=loaded.checkpoint.revision,
        draft=pair.draft.draft,
        draft_source=draft,
        draft_revision=pair.draft.checkpoint.revision,
        token_map=token_map,
    )
    return _assemble(parts, directory, findings)


def _map_rows(pair: Pair) -> tuple[Diagnostic, ...]:
    """Return SD532 of local sources: of a hub, each row would be a request."""
    if any(is_hub_source(part.source) for part in (pair.draft, pair.target)):
        return ()
    from specctl.ops.deep import map_row_findings  # weights are read by few commands

    return map_row_findings(pair.draft, pair.target)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    target: TargetCheckpoint
    target_source: str
    target_revision: str | None
    draft: DraftCheckpoint | None = None
    draft_source: str = ""
    draft_revision: str | None = None
    token_map: TokenMap | None = None


def _need_target(loaded: Loaded, findings: list[Diagnostic]) -> TargetCheckpoint:
    if loaded.target is not None:
        return loaded.target
    raise _refusal([*findings, *wrong_role(loaded, "target")])


def _refusal(findings: Sequence[Diagnostic]) -> DiagnosticError:
    """Return the error with everything that is wrong; infos would hide it."""
    return DiagnosticError([d for d in findings if d.severity != "info"])


def _unused(given: Given) -> list[Diagnostic]:
    return [
        diagnose(
            "SD714",
            where=name,
            message=f"`{name}` is a fact of a draft, and no draft was given",
            expected="a draft as second argument",
            found="none",
        )
        for name, value in given.by_option().items()
        if value is not None
    ]


def _with_given(
    pair: Pair, facts: DraftCheckpoint, given: Given, token_map: TokenMap | None
) -> tuple[Pair, list[Diagnostic]]:
    ids = None if token_map is None else token_map.ids_target
    changed = given.added_to(facts, ids_target=ids)
    notes = overridden_layers(pair.draft.source, facts, changed)
    return refit(pair.draft, pair.target, changed), list(notes)


def _assemble(parts: _Parts, directory: Path, findings: list[Diagnostic]) -> Emission:
    target = parts.target.to_target(
        source=portable_path(parts.target_source, directory), revision=parts.target_revision
    )
    draft, geometry, sharing = _draft_sections(parts, directory, findings)
    findings += target_not_served(parts.target, parts.target_source)
    findings += quantised_not_served(parts.target, parts.target_source)
    findings += activation_not_served(parts.target.decoder, parts.target_source)
    if has_errors(findings) or target is None:
        raise _refusal(findings or [_open_facts(parts.target_source)])
    vocabulary, problems = vocabulary_section(
        target,
        parts.draft,
        draft_source=parts.draft_source,
        token_map=parts.token_map,
        directory=directory,
    )
    findings += problems
    if has_errors(findings):
        raise _refusal(findings)
    sampling = Sampling(verification="seeded")
    origins = {
        **RULE_ORIGINS,
        **(NO_DRAFT_ORIGINS if draft is None else {}),
        **parts.target.origins,
        **({} if parts.draft is None else parts.draft.origins),
        **({} if parts.token_map is None else parts.token_map.origins),
        "vocabulary.target_vocab_size": TARGET_ROWS,
    }
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        specctl_version=__version__,
        target=target,
        draft=draft,
        geometry=geometry,
        vocabulary=vocabulary,
        sharing=sharing,
        parallel=parallel_section(parts.target, parts.draft, vocabulary),
        graphs=Graphs(batch_buckets=DEFAULT_BATCH_BUCKETS),
        sampling=sampling,
        diagnostics=_accepted(findings),
        fingerprint=fingerprint(
            target=target, draft=draft, geometry=geometry, vocabulary=vocabulary, sampling=sampling
        ),
        origins=_sorted(origins),
    )
    manifest = kept_origins(manifest)
    contradictions = check_manifest(manifest)
    if contradictions:
        raise _refusal([*findings, *contradictions])
    return Emission(manifest=manifest, diagnostics=tuple(findings))


def _draft_sections(
    parts: _Parts, directory: Path, findings: list[Diagnostic]
) -> tuple[Draft | None, Geometry, Sharing | None]:
    facts = parts.draft
    if facts is None:
        return None, NO_DRAFT_GEOMETRY, None
    draft = facts.to_draft(
        source=portable_path(parts.draft_source, directory), revision=parts.draft_revision
    )
    if facts.geometry is None:
        findings[:] = [d for d in findings if d.code != "SD301"]
        findings.append(
            diagnose(
                "SD301",
                where=f"{parts.draft_source}/config.json#",
                message="the files do not say how many tokens to draft, and none was given",
                expected="a token count",
                found="none",
                help="Give one: `--num-speculative-tokens 4`",
                severity="error",
            )
        )
    findings += quantised_not_served(facts, parts.draft_source)
    findings += activation_not_served(facts.decoder, parts.draft_source)
    if draft is None:
        findings += draft_not_served(facts, parts.draft_source)
    if draft is None and not has_errors(findings):
        findings.append(_open_facts(parts.draft_source))
    return draft, facts.geometry or NO_DRAFT_GEOMETRY, facts.sharing()


def _open_facts(source: str) -> Diagnostic:
    return diagnose(
        "SD206",
        where=f"{source}/config.json#",
        message="a fact that the manifest needs is open; `specctl inspect` shows which",
        expected="every fact stated",
        found="an open one",
    )


def _accepted(findings: Sequence[Diagnostic]) -> tuple[AcceptedDiagnostic, ...]:
    return tuple(
        AcceptedDiagnostic(code=d.code, where=d.where, message=d.message)
        for d in findings
        if d.severity == "warning"
    )


def _sorted(origins: dict[str, Origin]) -> dict[str, Origin]:
    return {path: origins[path] for path in sorted(origins)}
