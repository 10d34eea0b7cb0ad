"""Say everything that headers, the index and the config of a source tell, without its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.checkpoint import DEFAULT_ACCESS, Access, TensorEntry
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.manifest import Origin, TensorRef, find_origin
from specctl.contract.text import printable
from specctl.contract.vocabulary_map import map_digest
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.ops.load import Loaded, fit, load
from specctl.ops.report import (
    AuxHidden,
    BundledDraft,
    EngineReport,
    GeometryFacts,
    InspectReport,
    Part,
    Roles,
    SharedTensor,
    SharingFacts,
    Source,
    Tensor,
    Tensors,
    VocabularyFacts,
    finding,
)
from specctl.ops.severity import USUAL, SeverityRules
from specctl.ops.token_map_check import is_token_map

if TYPE_CHECKING:
    from specctl.ops.deep import WeightStep

_UNMAPPED = "unmapped"
_TRUNK = "trunk"
NO_VOCABULARY = VocabularyFacts(
    target_vocab_size=None,
    draft_vocab_size=None,
    map_kind=None,
    map_tensor=None,
    mask_tensor=None,
    map_digest=None,
    decided_by=None,
    tokenizer_size=None,
    eos_token_ids=(),
)
NO_SHARING = SharingFacts(embedding=None, head=None, head_decided_by=None, decoys=())
_PARTS = {"d2t": "vocabulary map", "t2d": "vocabulary map", "norm": "norms"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """A report and the map that it only counts.

    Args:
        draft_to_target: absolute target ids in draft-id order, None without a decided map.
    """

    report: InspectReport
    draft_to_target: tuple[int, ...] | None


def inspect(
    source: str,
    target: str | None = None,
    *,
    rules: SeverityRules = USUAL,
    access: Access = DEFAULT_ACCESS,
    deep: WeightStep | None = None,
) -> InspectReport:
    """Return the facts and findings of a source; without facts when there is nothing to open.

    Args:
        source: directory or hub source of a draft or target.
        target: that of the target that a draft is for.
        rules: severities of this run.
        access: what is allowed while they are read.
        deep: told of the progress of reading all weights; None to read none.
    """
    return inspect_with_map(source, target, rules=rules, access=access, deep=deep).report


def inspect_with_map(
    source: str,
    target: str | None = None,
    *,
    rules: SeverityRules = USUAL,
    access: Access = DEFAULT_ACCESS,
    deep: WeightStep | None = None,
    is_listed: bool = True,
) -> Inspected:
    """Return what `inspect` does and the vocabulary map itself, for a picture of it.

    Args:
        source: this and the next four as for `inspect`.
        target: the same.
        rules: the same.
        access: the same.
        deep: the same.
        is_listed: false leaves the list of all tensors empty, for a text that only counts them.
    """
    try:
        other = None if target is None else load(target, access=access)
        if is_token_map(Path(source)):
            from specctl.ops.inspect_token_map import inspect_map  # few sources are a map

            report, ids = inspect_map(
                source, other, None if other is None else _source(other), rules
            )
            return Inspected(report=report, draft_to_target=ids)
        loaded = load(source, access=access)
    except DiagnosticError as error:
        found = rules.apply(error.diagnostics)
        return Inspected(report=_without_facts(source, found), draft_to_target=None)
    ids = None if loaded.draft is None else loaded.draft.draft_to_target
    report = _report(loaded, other, rules, deep, is_listed=is_listed)
    return Inspected(report=report, draft_to_target=ids)


def _report(
    loaded: Loaded,
    other: Loaded | None,
    rules: SeverityRules,
    deep: WeightStep | None,
    *,
    is_listed: bool,
) -> InspectReport:
    diagnostics = loaded.diagnostics
    if other is not None:
        pair = fit(loaded, other)
        loaded, diagnostics = pair.draft, (*pair.diagnostics, *other.diagnostics)
    if deep is not None:
        from specctl.ops.deep import deep_findings  # weights are read for --deep only

        diagnostics = (*diagnostics, *deep_findings(loaded, other, deep))
    facts = None if other is None else other.target
    return InspectReport(
        format=loaded.detection.format,
        roles=Roles(source=_source(loaded), target=None if other is None else _source(other)),
        geometry=None if loaded.draft is None else _geometry(loaded.draft),
        vocabulary=_vocabulary(loaded, facts),
        aux_hidden=None if loaded.draft is None else _aux_hidden(loaded.draft),
        sharing=_sharing(loaded, facts),
        details={} if loaded.draft is None else dict(loaded.draft.details),
        bundled=_bundled(loaded),
        engines=_engines(loaded, facts),
        tensors=_tensors(loaded, is_listed=is_listed),
        diagnostics=tuple(
            finding(d, format=loaded.detection.format) for d in rules.apply(diagnostics)
        ),
    )


def _bundled(loaded: Loaded) -> BundledDraft | None:
    if loaded.bundled is None:
        return None
    from specctl.ops.bundled import bundled_report  # few targets have a draft inside

    return bundled_report(loaded.bundled)


def _engines(loaded: Loaded, target: TargetCheckpoint | None) -> tuple[EngineReport, ...]:
    if loaded.draft is None:
        return ()
    from specctl.ops.engines import engine_reports  # the table is of drafts

    return engine_reports(loaded.draft, target)


def _without_facts(source: str, diagnostics: Iterable[Diagnostic]) -> InspectReport:
    nothing = Source(
        path=printable(source),
        revision=None,
        role=None,
        format=None,
        architecture=None,
        algorithm=None,
        target_name=None,
        evidence=(),
    )
    return InspectReport(
        format=None,
        roles=Roles(source=nothing, target=None),
        geometry=None,
        vocabulary=NO_VOCABULARY,
        aux_hidden=None,
        sharing=NO_SHARING,
        details={},
        bundled=None,
        engines=(),
        tensors=Tensors(num_tensors=0, num_bytes=0, num_files=0, parts=(), list=()),
        diagnostics=tuple(finding(d) for d in diagnostics),
    )


def _source(loaded: Loaded) -> Source:
    facts = loaded.draft or loaded.target
    return Source(
        path=printable(loaded.source),
        revision=loaded.checkpoint.revision,
        role=loaded.detection.role,
        format=loaded.detection.format,
        architecture=None if facts is None else facts.architecture,
        algorithm=None if loaded.draft is None else loaded.draft.algorithm,
        target_name=None if loaded.draft is None else loaded.draft.target_name,
        evidence=loaded.detection.evidence,
    )


def _geometry(draft: DraftCheckpoint) -> GeometryFacts:
    known = draft.geometry
    count = draft.declared_num_speculative_tokens
    return GeometryFacts(
        num_speculative_tokens=count if known is None else known.num_speculative_tokens,
        draft_width=None if known is None else known.draft_width,
        verify_width=None if known is None else known.verify_width,
        sample_from_anchor=draft.sample_from_anchor,
        draft_block_size=draft.draft_block_size,
        decided_by=describe_origin(draft.origins, "geometry.num_speculative_tokens"),
    )


def _vocabulary(loaded: Loaded, target: TargetCheckpoint | None) -> VocabularyFacts:
    draft, own = loaded.draft, loaded.target
    known_target = own or target
    ids = None if draft is None else draft.draft_to_target
    tensors: Mapping[str, TensorRef] = {} if draft is None else draft.tensors
    size = None if known_target is None else known_target.vocab_size
    if draft is not None and draft.target_vocab_size is not None:
        size = draft.target_vocab_size
    return VocabularyFacts(
        target_vocab_size=size,
        draft_vocab_size=None if draft is None else draft.draft_vocab_size,
        map_kind=None if draft is None else draft.map_kind,
        map_tensor=tensors.get("d2t"),
        mask_tensor=tensors.get("t2d"),
        map_digest=None if ids is None else map_digest(ids),
        decided_by=None
        if draft is None
        else describe_origin(draft.origins, "vocabulary.map_digest"),
        tokenizer_size=None if known_target is None else known_target.tokenizer_size,
        eos_token_ids=() if known_target is None else known_target.eos_token_ids,
    )


def _aux_hidden(draft: DraftCheckpoint) -> AuxHidden | None:
    if not draft.captures_states:
        return None
    return AuxHidden(
        num_states=draft.num_aux_states,
        numbering=draft.aux_numbering,
        read_ids=draft.declared_aux_ids,
        output_layer_ids=draft.aux_layer_ids,
        decided_by=describe_origin(
            draft.origins,
            "draft.aux_numbering" if draft.aux_layer_ids is None else "draft.aux_layer_ids",
        ),
    )


def _shared(own: TensorRef | None, borrowed: TensorRef | None) -> SharedTensor:
    if own is not None:
        return SharedTensor(origin="own", tensor=own)
    return SharedTensor(origin="target", tensor=borrowed)


def _sharing(loaded: Loaded, target: TargetCheckpoint | None) -> SharingFacts:
    if loaded.target is not None:
        own = loaded.target
        embedding = (
            None if own.embedding is None else SharedTensor(origin="own", tensor=own.embedding)
        )
        head = (
            None
            if own.head is None
            else SharedTensor(origin="tied" if own.is_head_tied else "own", tensor=own.head)
        )
        return SharingFacts(
            embedding=embedding,
            head=head,
            head_decided_by=own.head_rule,
            decoys=own.decoys,
        )
    if loaded.draft is None:
        return NO_SHARING
    draft = loaded.draft
    embedding = _shared(draft.own_embedding, None if target is None else target.embedding)
    head = _shared(draft.own_head, None if target is None else target.head)
    if draft.own_head is None and draft.is_head_tied:
        head = SharedTensor(origin="tied", tensor=draft.own_embedding)
    return SharingFacts(
        embedding=embedding if draft.reads_tokens else None,
        head=head,
        head_decided_by=None,
        decoys=(),
    )


def _tensors(loaded: Loaded, *, is_listed: bool) -> Tensors:
    stored = loaded.checkpoint.tensors
    facts = loaded.draft or loaded.target
    roles = {} if facts is None else {ref.key: role for role, ref in facts.tensors.items()}
    if loaded.bundled is not None:
        roles |= {ref.key: f"bundled.{role}" for role, ref in loaded.bundled.tensors.items()}
    # Of a target that the runtime does not run, the layers are counted and not described.
    is_outline = loaded.target is not None and loaded.target.decoder is None
    other = _TRUNK if is_outline else None
    parts = _parts(stored, roles, other)
    return Tensors(
        num_tensors=len(stored),
        num_bytes=sum(part.num_bytes for part in parts),
        num_files=len(loaded.checkpoint.files),
        parts=parts,
        list=_listed(stored, roles, other) if is_listed else (),
    )


def _listed(
    stored: Mapping[str, TensorEntry], roles: Mapping[str, str], other: str | None
) -> tuple[Tensor, ...]:
    """Return all tensors in the order of files and places; `other` is the role of the rest."""
    entries = sorted(stored.values(), key=attrgetter("file", "begin", "key"))
    listed = [
        Tensor(
            key=entry.key,
            role=roles.get(entry.key, other),
            file=entry.file,
            shape=entry.shape,
            dtype=entry.dtype,
            begin=entry.begin,
            end=entry.end,
        )
        for entry in entries
    ]
    return tuple(listed)


def _parts(
    stored: Mapping[str, TensorEntry], roles: Mapping[str, str], other: str | None
) -> tuple[Part, ...]:
    """Return counts and bytes of each part, the largest first."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    rest = sum([entry.end - entry.begin for entry in stored.values()])
    named = [(part_of(role), stored[key]) for key, role in roles.items() if key in stored]
    for name, entry in named:
        counts[name] = counts.get(name, 0) + 1
        sizes[name] = sizes.get(name, 0) + entry.nbytes
        rest -= entry.nbytes
    num_others = len(stored) - len(named)
    if num_others:
        name = part_of(other)
        counts[name] = counts.get(name, 0) + num_others
        sizes[name] = sizes.get(name, 0) + rest
    return tuple(
        Part(name=name, num_tensors=counts[name], num_bytes=sizes[name])
        for name in sorted(counts, key=lambda name: (-sizes[name], name))
    )


def part_of(role: str | None) -> str:
    """Return the part that a canonical role is counted under."""
    if role is None:
        return _UNMAPPED
    first = role.partition(".")[0]
    if first in _PARTS:
        return _PARTS[first]
    if first.endswith("_norm"):
        return "norms"
    return first.partition("_")[0] if first.startswith("markov") else first


def describe_origin(origins: Mapping[str, Origin], path: str) -> str | None:
    """Return the origin of a fact in words: `read config.json#/x`, `derived ...: rule`."""
    origin = find_origin(origins, path)
    if origin is None:
        return None
    rule = f": {origin.rule}" if origin.rule else ""
    return f"{origin.kind} {origin.where}{rule}"
