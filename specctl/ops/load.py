"""Open a source, find out what it is, read its facts and collect every finding, once for all uses.

Invariants: problems never stop the reading; they are in `diagnostics`, each with a place that names
the file as the user can open it. Only a source that is no checkpoint at all raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from specctl import checks, formats
from specctl.checkpoint import DEFAULT_ACCESS, Access, Checkpoint, open_checkpoint
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.file_names import MASK_EMBEDDING, QUANTIZATION, TOKENIZER
from specctl.contract.findings import Findings, capped
from specctl.draft import Detection, DraftCheckpoint, TargetCheckpoint

_IN_TARGET = "target "
_ALL_TENSORS = ("tensor names", "tensor headers")
_OF_A_DRAFT_ALONE = ("SD301",)  # a target does not say how many tokens its prediction layer drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """One opened source; exactly one of `draft` and `target` is set when its format is known.

    Args:
        source: as the user wrote it.
        bundled: the prediction layers inside a target, read as a draft.
        diagnostics: container, detection, reader and checks, in this order.
    """

    source: str
    checkpoint: Checkpoint
    detection: Detection
    draft: DraftCheckpoint | None
    target: TargetCheckpoint | None
    bundled: DraftCheckpoint | None
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A draft and its target.

    Args:
        draft: with the facts closed that only the target decides.
        diagnostics: of the draft and of the pair, without the target's own.
    """

    draft: Loaded
    target: Loaded
    diagnostics: tuple[Diagnostic, ...]


def load(source: str, *, access: Access = DEFAULT_ACCESS) -> Loaded:
    """Open one source and check it alone.

    Args:
        source: a directory, or `hf:org/name[@revision][/subfolder]`, or the same with `ms:`.
        access: what is allowed while it is read.

    Raises:
        DiagnosticError: SD119, SD120, SD135 (there is nothing to open), SD136 to SD147 (hubs).
    """
    checkpoint = open_checkpoint(source, access=access)
    detection = formats.detect(checkpoint)
    findings = [*checkpoint.diagnostics, *detection.diagnostics]
    draft: DraftCheckpoint | None = None
    target: TargetCheckpoint | None = None
    bundled: DraftCheckpoint | None = None
    try:
        if detection.role == "draft":
            draft = formats.read_draft(checkpoint, detection)
            findings += [*draft.diagnostics, *checks.check_draft(draft)]
        elif detection.role == "target":
            target = formats.read_target(checkpoint, detection)
            findings += [*target.diagnostics, *checks.check_target(target)]
        if detection.bundled is not None:
            bundled = formats.read_draft(checkpoint, detection)
            own = (*bundled.diagnostics, *checks.check_draft(bundled))
            known = set(findings)
            findings += [d for d in own if d.code not in _OF_A_DRAFT_ALONE and d not in known]
    except DiagnosticError as error:
        known = set(findings)
        findings += [d for d in error.diagnostics if d not in known]
    findings += file_findings(checkpoint, draft, bundled=bundled)
    return Loaded(
        source=source,
        checkpoint=checkpoint,
        detection=detection,
        draft=draft,
        target=target,
        bundled=bundled,
        diagnostics=located(findings, source),
    )


def file_findings(
    checkpoint: Checkpoint,
    draft: DraftCheckpoint | None,
    *,
    bundled: DraftCheckpoint | None = None,
) -> tuple[Diagnostic, ...]:
    """Return what the tensor table and the files beside the weights show whatever the format.

    Args:
        checkpoint: the opened files.
        draft: the draft that they are, None for another role.
        bundled: prediction layers among the tensors of a target.
    """
    own = () if bundled is None else (ref.key for ref in bundled.tensors.values())
    try:
        side = checkpoint.json_file(QUANTIZATION)
    except DiagnosticError as error:
        return error.diagnostics
    found = checks.check_files(checkpoint, side=side, draft_keys=frozenset(own))
    return (*found, *_of_mask_vector(checkpoint, draft or bundled))


def _of_mask_vector(
    checkpoint: Checkpoint, draft: DraftCheckpoint | None
) -> tuple[Diagnostic, ...]:
    if MASK_EMBEDDING not in checkpoint.file_names:
        return ()
    from specctl.checkpoint.mask_vector import read_mask_vector  # pickles: for this file only
    from specctl.checks.mask_vector import check_mask_vector

    findings = Findings()
    vector = read_mask_vector(checkpoint.store, MASK_EMBEDDING, findings)
    if vector is not None and draft is not None:
        findings.extend(check_mask_vector(vector, draft))
    return findings.result()


def _of_tokenizers(draft: Checkpoint, target: Checkpoint) -> tuple[Diagnostic, ...]:
    """Compare tokenizers only when their bytes differ: decoding two of them takes a while."""
    if TOKENIZER not in draft.file_names or TOKENIZER not in target.file_names:
        return ()
    try:
        if draft.file_digest(TOKENIZER) == target.file_digest(TOKENIZER):
            return ()
    except DiagnosticError as error:
        return error.diagnostics
    from specctl.checks.tokenizers import check_tokenizers  # pairs of unequal tokenizers only
    from specctl.formats.tokenizer import token_ids

    ours, theirs = token_ids(draft), token_ids(target)
    return () if ours is None or theirs is None else tuple(check_tokenizers(ours, theirs))


def _of_mask_token(draft: DraftCheckpoint, target: Checkpoint) -> tuple[Diagnostic, ...]:
    """Look the mask token of a block draft up in the target's tokenizer."""
    token = draft.mask_token_id
    if token is None or not draft.is_block or "mask_file" in draft.details:
        return ()
    from specctl.checks.tokenizers import check_mask_token  # tokenizers: for block drafts only
    from specctl.formats.tokenizer import text_token

    text = text_token(target, token)
    return () if text is None else tuple(check_mask_token(draft, text))


def fit(draft: Loaded, target: Loaded) -> Pair:
    """Return the pair; a source in the wrong role is SD201 and leaves the fit unchecked."""
    wrong = [*wrong_role(draft, "draft"), *wrong_role(target, "target")]
    if draft.draft is None or target.target is None:
        return Pair(draft=draft, target=target, diagnostics=(*draft.diagnostics, *wrong))
    return refit(draft, target, draft.draft)


def refit(loaded: Loaded, target: Loaded, facts: DraftCheckpoint) -> Pair:
    """Return the pair with `facts` in place of the draft's own, completed by the target.

    Args:
        loaded: the draft as opened.
        target: a source in the role of a target.
        facts: the draft's facts, possibly with given ones.
    """
    if target.target is None:
        raise ValueError("the fit needs a target that was read")
    completed = formats.complete_draft(facts, target.target)
    findings = [
        *loaded.checkpoint.diagnostics,
        *loaded.detection.diagnostics,
        *completed.diagnostics,
        *checks.check_draft(completed),
        *file_findings(loaded.checkpoint, completed),
        *checks.check_pair(completed, target.target),
        *_of_tokenizers(loaded.checkpoint, target.checkpoint),
        *_of_mask_token(completed, target.checkpoint),
        *checks.check_inheritance(loaded.checkpoint.config or {}, target.checkpoint.config or {}),
    ]
    diagnostics = located(findings, loaded.source, target=target.source)
    draft = replace(loaded, draft=completed, diagnostics=diagnostics)
    return Pair(draft=draft, target=target, diagnostics=diagnostics)


def wrong_role(loaded: Loaded, role: str) -> Iterable[Diagnostic]:
    """Yield SD201 when a source is known to be something else than `role`."""
    if loaded.detection.role in (role, None):
        return
    yield diagnose(
        "SD201",
        where=f"{loaded.source}/config.json#",
        message=f"a {role} is needed here and this is a {loaded.detection.role}",
        expected=role,
        found=f"{loaded.detection.role}, {loaded.detection.format}",
        help=f"Pass a {role}; `specctl inspect {loaded.source}` shows what this is",
    )


def located(
    diagnostics: Iterable[Diagnostic], source: str, *, target: str | None = None
) -> tuple[Diagnostic, ...]:
    """Return the diagnostics with places that start at a source instead of inside it.

    Args:
        diagnostics: of a reader or check; `target config.json#/...` is a place in the target,
            `tensor names` the table of all tensors, `--option` stays as it is.
        source: directory as the user wrote it.
        target: directory of the target.
    """
    return tuple(
        msgspec.structs.replace(d, where=_located(d.where, source, target))
        for d in capped(diagnostics)
    )


def _located(where: str, source: str, target: str | None) -> str:
    if where.startswith("--"):
        return where
    if where.startswith(_IN_TARGET) and target is not None:
        source, where = target, where.removeprefix(_IN_TARGET)
    root = source.rstrip("/") or "/"
    if where in _ALL_TENSORS:
        return f"{root}#/tensors"
    return where if root == "." else f"{root}/{where}"
