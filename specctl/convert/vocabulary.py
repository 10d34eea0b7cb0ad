"""Cut a draft's head to a token map, name the rows of a cut one, or make it full again.

Invariants: rows are gathered, never computed. The ids of a map are sorted, so that the lowest
target id wins a tie as it does over the full vocabulary. A reduced head becomes full only when
each of its rows is, byte for byte, a row of the target's head: trained rows have no place among
rows of another head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from specctl.checkpoint import WEIGHT_DTYPES, Checkpoint, tensor_place
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import TensorRef
from specctl.contract.roles import MAP_ROLES, find_role
from specctl.convert.files import tensor_views
from specctl.convert.reading import SourceFiles
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.formats.written import Copy, Origin, Rows, TensorSource, Written

MAP_OPTION = "--token-map"
FULL_OPTION = "--full-vocabulary"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherVocabulary:
    """A draft with another vocabulary, and where the changed tensors come from.

    Args:
        draft: facts as they are to be written.
        sources: stored tensor -> what is written in its place.
        diagnostics: SD406 for end ids that the map leaves out.
    """

    draft: DraftCheckpoint
    sources: Mapping[tuple[str, str], TensorSource]
    diagnostics: tuple[Diagnostic, ...] = ()

    def apply(self, written: Written) -> Written:
        """Return what a writer returned, with the changed tensors in place."""
        tensors = {
            key: self.sources.get((source.ref.file, source.ref.key), source)
            if isinstance(source, Copy)
            else source
            for key, source in written.tensors.items()
        }
        return replace(written, tensors=tensors)


def reduced(
    draft: DraftCheckpoint, target: TargetCheckpoint | None, ids: tuple[int, ...]
) -> OtherVocabulary:
    """Return the draft with its head, or the target's, cut to a map.

    Args:
        draft: proposes over the whole target vocabulary.
        target: gives the head that the draft borrows, None when the draft has its own.
        ids: target ids in any order.

    Raises:
        DiagnosticError: SD607.
    """
    if draft.map_kind == "reduced":
        raise _refused(MAP_OPTION, "this draft's head is reduced already and has its own map")
    if draft.map_kind != "identity" or find_role("head", draft.roles) is None:
        raise _refused(MAP_OPTION, "this draft's head does not cover the target's vocabulary")
    if not any(role.shape[:1] == ("R",) for role in draft.roles):
        raise _refused(MAP_OPTION, f"drafts of algorithm `{draft.algorithm}` have no map")
    size, head, origin = draft.target_vocab_size, *_head(draft, target)
    _refuse_scaled(MAP_OPTION, head, draft if origin == "draft" else None)
    chosen = tuple(sorted(ids))
    if size is None or chosen[-1] >= min(size, head.shape[0]):
        raise _refused(MAP_OPTION, f"id {chosen[-1]} has no row in a head of {head.shape[0]}")
    sources: dict[tuple[str, str], TensorSource] = {
        (head.file, head.key): Rows(ref=head, rows=chosen, origin=origin)
    }
    for role, ref in draft.tensors.items():
        if _is_cut(role, draft):
            sources[ref.file, ref.key] = Rows(ref=ref, rows=chosen)
    kept = {role: ref for role, ref in draft.tensors.items() if role not in MAP_ROLES}
    changed = replace(
        draft,
        draft_vocab_size=len(chosen),
        draft_to_target=chosen,
        d2t=None,
        t2d=None,
        tensors=MappingProxyType({**kept, "head": head}),
    )
    return OtherVocabulary(
        draft=changed, sources=sources, diagnostics=tuple(_end_ids(draft, target, chosen))
    )


def lacks_map(draft: DraftCheckpoint) -> bool:
    """Tell whether a draft has a reduced head and nothing that says which ids its rows are."""
    return draft.map_kind == "reduced" and not {*MAP_ROLES} & {*draft.tensors} - {"t2d"}


def adopted(
    draft: DraftCheckpoint, target: TargetCheckpoint | None, ids: tuple[int, ...]
) -> OtherVocabulary:
    """Return a reduced draft without a map of its own, with a map that stood beside it.

    Args:
        draft: `lacks_map` holds.
        target: whose end ids must be reachable.
        ids: target ids in draft-id order: the i-th is that of the head's i-th row.

    Raises:
        DiagnosticError: SD607 when the map has another size than the draft's vocabulary, or the
            draft's `t2d` marks other ids.
    """
    if draft.draft_vocab_size != len(ids):
        text = f"the map has {len(ids)} ids for a draft vocabulary of {draft.draft_vocab_size}"
        raise _refused(MAP_OPTION, text)
    marked = None if draft.t2d is None else [place for place, bit in enumerate(draft.t2d) if bit]
    if marked is not None and marked != sorted(ids):
        text = f"the stored mask marks other target ids than the map names: {marked[:3]} first"
        raise _refused(MAP_OPTION, text)
    changed = replace(draft, draft_to_target=ids)
    return OtherVocabulary(
        draft=changed, sources={}, diagnostics=tuple(_end_ids(draft, target, ids))
    )


def _refuse_scaled(option: str, head: TensorRef, draft: DraftCheckpoint | None) -> None:
    """Raise SD607 for a quantised head: its scales would not fit the other rows."""
    has_scale = draft is not None and any(role.startswith("head.") for role in draft.tensors)
    if has_scale or head.dtype not in WEIGHT_DTYPES:
        raise _refused(option, f"`{head.key}` is quantised, and its scales belong to its own rows")


def _head(draft: DraftCheckpoint, target: TargetCheckpoint | None) -> tuple[TensorRef, Origin]:
    if "head" in draft.tensors:
        return draft.tensors["head"], "draft"
    if target is None or target.head is None:
        raise _refused(MAP_OPTION, "the draft has no head of its own; pass --target TARGET")
    return target.head, "target"


def _end_ids(
    draft: DraftCheckpoint, target: TargetCheckpoint | None, ids: tuple[int, ...]
) -> Iterator[Diagnostic]:
    ends = {*draft.eos_token_ids, *(() if target is None else target.eos_token_ids)}
    missing = sorted(ends - set(ids))
    if missing:
        yield diagnose(
            "SD406",
            where=MAP_OPTION,
            message=f"end ids {missing} are not in the map",
            expected=f"all of {sorted(ends)}",
            found=f"without {missing}",
        )


def full(
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None,
    checkpoints: Mapping[Origin, Checkpoint],
) -> OtherVocabulary:
    """Return the draft with the target's full head in place of rows gathered from it.

    Raises:
        DiagnosticError: SD602 when a row is not the target's, SD607 when the draft is full already
            or has other tensors cut to the map.
    """
    ids, head = draft.draft_to_target, draft.tensors.get("head")
    if draft.map_kind != "reduced" or ids is None:
        raise _refused(FULL_OPTION, "this draft's vocabulary is not reduced")
    if target is None or target.head is None or draft.target_vocab_size is None:
        raise _refused(FULL_OPTION, "the other rows are the target's; pass --target TARGET")
    _refuse_scaled(FULL_OPTION, target.head, draft)
    cut = [role for role in draft.tensors if _is_cut(role, draft)]
    if cut:
        raise _refused(FULL_OPTION, f"`{draft.tensors[cut[0]].key}` has no rows for other ids")
    if head is not None:
        _check_rows(head, target.head, ids, checkpoints)
    size = draft.target_vocab_size
    kept = {role: ref for role, ref in draft.tensors.items() if role not in MAP_ROLES}
    changed = replace(
        draft,
        draft_vocab_size=size,
        draft_to_target=None,
        d2t=None,
        t2d=None,
        tensors=MappingProxyType({**kept, "head": target.head}),
    )
    whole = Rows(ref=target.head, rows=tuple(range(size)), origin="target")
    source: TensorSource = (
        Copy(ref=target.head, origin="target") if target.head.shape[0] == size else whole
    )
    return OtherVocabulary(draft=changed, sources={(target.head.file, target.head.key): source})


def _is_cut(role: str, draft: DraftCheckpoint) -> bool:
    entry = find_role(role, draft.roles)
    return role not in ("head", *MAP_ROLES) and entry is not None and entry.shape[:1] == ("R",)


def _check_rows(
    head: TensorRef,
    full_head: TensorRef,
    ids: tuple[int, ...],
    checkpoints: Mapping[Origin, Checkpoint],
) -> None:
    """Raise SD602 unless each row of the reduced head is the target's row of its id."""
    is_alike = (head.dtype, head.shape[1:]) == (full_head.dtype, full_head.shape[1:])
    if not is_alike or max(ids) >= full_head.shape[0]:
        raise _not_rows(head, full_head, "another dtype or shape")
    size = (head.end - head.begin) // head.shape[0]
    with SourceFiles(checkpoints, moved=lambda count: None) as sources:
        own = _by_row(tensor_views(Copy(ref=head), sources), size)
        theirs = _by_row(
            tensor_views(Rows(ref=full_head, rows=ids, origin="target"), sources), size
        )
        other = sum(1 for left, right in zip(own, theirs, strict=True) if left != right)
    if other:
        raise _not_rows(head, full_head, f"{other} of {len(ids)} rows differ")


def _by_row(views: Iterator[memoryview], size: int) -> Iterator[bytes]:
    rest = b""
    for view in views:
        data = rest + bytes(view)
        whole = len(data) - len(data) % size
        for begin in range(0, whole, size):
            yield data[begin : begin + size]
        rest = data[whole:]


def _not_rows(head: TensorRef, full_head: TensorRef, found: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD602",
            where=tensor_place(head),
            message="the reduced head is not a part of the target's head, so it has no full form",
            expected=f"rows of {tensor_place(full_head)}",
            found=found,
        )
    )


def _refused(option: str, message: str) -> DiagnosticError:
    return DiagnosticError(diagnose("SD607", where=option, message=message))
