"""A draft's vocabularies and its map, from config and small tensors.

Invariants: `draft_vocab_size` is never a library default; the head's rows stand in for an absent
field and are reported (EAGLE issue 249). What the map says is judged by `specctl.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.findings import Findings
from specctl.contract.manifest import TensorRef
from specctl.contract.map_encoding import decide_map_encoding
from specctl.formats.fields import Fields
from specctl.formats.names import Matched

T = TypeVar("T")
_READINGS: Mapping[str, str] = MappingProxyType(
    {
        "offset": "d2t holds offsets",
        "absolute": "d2t holds absolute ids",
        "ambiguous": "d2t is undecided",
        "invalid": "d2t is no map",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyFacts:
    """Sizes and map of a draft; fields as in `DraftCheckpoint`."""

    target_vocab_size: int | None
    draft_vocab_size: int | None
    d2t: tuple[int, ...] | None
    t2d: bytes | None
    draft_to_target: tuple[int, ...] | None


def read_vocabulary(
    checkpoint: Checkpoint, matched: Matched, *, root: Fields, layers: Fields
) -> VocabularyFacts:
    """Return sizes and map; SD133 for a map of another dtype, SD413, SD414.

    Args:
        checkpoint: holds the map tensors, which are read by byte range.
        matched: its tensors by role.
        root: config object with `draft_vocab_size`.
        layers: config object whose `vocab_size` is the target's.
    """
    findings = root.findings
    target_size = layers.integer("vocab_size", "vocabulary.target_vocab_size", is_required=True)
    d2t = _read(matched.tensors.get("d2t"), checkpoint.read_ints, findings)
    t2d = _read(matched.tensors.get("t2d"), checkpoint.read_mask, findings)
    draft_size = _draft_size(root, matched, target_size, d2t)
    _check_tie(root, layers, target_size, draft_size)
    draft_to_target = None
    if d2t is not None and target_size is not None:
        encoding = decide_map_encoding(d2t, t2d, target_size)
        draft_to_target = encoding.draft_to_target
        where = tensor_place(matched.tensors["d2t"])
        rule = f"{_READINGS[encoding.kind]}: {encoding.evidence}"
        findings.derived("vocabulary.map_digest", where, rule)
    sizes = "draft_vocab_size against vocab_size"
    findings.derived("vocabulary.map_kind", root.where("draft_vocab_size"), sizes)
    return VocabularyFacts(
        target_vocab_size=target_size,
        draft_vocab_size=draft_size,
        d2t=d2t,
        t2d=t2d,
        draft_to_target=draft_to_target,
    )


def identity_vocabulary(
    layers: Fields, *, rule: str = "MTP layers use the target's head"
) -> VocabularyFacts:
    """Return the facts of a draft that always proposes over the target's vocabulary.

    Args:
        layers: config object with `vocab_size`.
        rule: why, for the origins.
    """
    size = layers.integer("vocab_size", "vocabulary.target_vocab_size", is_required=True)
    layers.findings.derived("vocabulary.draft_vocab_size", layers.where("vocab_size"), rule)
    layers.findings.derived("vocabulary.map_kind", layers.where("vocab_size"), rule)
    return VocabularyFacts(
        target_vocab_size=size, draft_vocab_size=size, d2t=None, t2d=None, draft_to_target=None
    )


def report_library_map(facts: VocabularyFacts, matched: Matched, findings: Findings) -> None:
    """Report what Speculators' own library does not take: SD222 (order), SD223 (no mask)."""
    report_map_order(facts, matched, findings)
    ids, ref, size = facts.draft_to_target, matched.tensors.get("d2t"), facts.target_vocab_size
    if ids is None or ref is None or size is None or not _is_map(ids, size):
        return
    if len(ids) == facts.draft_vocab_size != size and "t2d" not in matched.tensors:
        findings.add(
            "SD223",
            where=tensor_place(ref),
            message=f"`{ref.key}` maps {len(ids)} ids and no `t2d` marks them",
            expected=f"`t2d`, a mask of {size} target ids",
            found="nothing",
        )


def report_map_order(facts: VocabularyFacts, matched: Matched, findings: Findings) -> None:
    """Report SD222 for a map in another order than all trainers but Model-Optimizer write."""
    ids, ref, size = facts.draft_to_target, matched.tensors.get("d2t"), facts.target_vocab_size
    if ids is None or ref is None or size is None or not _is_map(ids, size):
        return
    place = next((i for i, (a, b) in enumerate(pairwise(ids)) if a >= b), None)
    if place is not None:
        findings.add(
            "SD222",
            where=tensor_place(ref),
            message=f"draft id {place + 1} stands for target id {ids[place + 1]}, below the one "
            "before",
            expected="ascending target ids",
            found=f"{ids[place]}, then {ids[place + 1]}",
        )


def _is_map(ids: tuple[int, ...], size: int) -> bool:
    """Tell whether the ids are a map at all; what is wrong with others is SD402 or SD404."""
    return bool(ids) and len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < size


def _read(ref: TensorRef | None, reader: Callable[[str], T], findings: Findings) -> T | None:
    if ref is None:
        return None
    if len(ref.shape) != 1:
        findings.add(
            "SD133",
            where=tensor_place(ref),
            message=f"`{ref.key}` has {len(ref.shape)} dimensions; a map has one",
            expected="[ids]",
            found=list(ref.shape),
        )
        return None
    try:
        return reader(ref.key)
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
        return None


def _draft_size(
    root: Fields, matched: Matched, target_size: int | None, d2t: tuple[int, ...] | None
) -> int | None:
    path = "vocabulary.draft_vocab_size"
    if root.has("draft_vocab_size"):
        return root.integer("draft_vocab_size", path)
    head = matched.tensors.get("head")
    if head is not None and head.shape:
        size, where = head.shape[0], tensor_place(head)
    elif d2t is not None:
        size, where = len(d2t), tensor_place(matched.tensors["d2t"])
    else:
        rule = "no head and no map: the target's head is used"
        root.findings.derived(path, root.where("draft_vocab_size"), rule)
        return target_size
    root.findings.derived(path, where, "rows of the head or map")
    if size != target_size:
        root.findings.add(
            "SD413",
            where=root.where("draft_vocab_size"),
            message=f"`draft_vocab_size` is absent; {size} was taken from {where}",
            expected=f"`draft_vocab_size`: {size}",
            found="nothing",
        )
    return size


def _check_tie(
    root: Fields, layers: Fields, target_size: int | None, draft_size: int | None
) -> None:
    source = root if root.has("tie_word_embeddings") else layers
    if not source.flag("tie_word_embeddings") or target_size == draft_size:
        return
    source.findings.add(
        "SD414",
        where=source.where("tie_word_embeddings"),
        message=f"a head of {draft_size} rows cannot be tied to an embedding of {target_size}",
        expected="false",
        found="true",
    )
