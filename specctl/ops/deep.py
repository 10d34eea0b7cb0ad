"""Read the weights of a source, on request, and say what their numbers show.

Only the source itself is read through; of its target, the embedding and the head that the draft's
own are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from specctl.checkpoint import Checkpoint, TensorEntry, tensor_place
from specctl.checks.likeness import Table, check_likeness, check_map_rows, check_mask_row
from specctl.checks.numerics import Reading, check_numbers
from specctl.checks.vocabulary import map_tensor
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.file_names import MASK_EMBEDDING
from specctl.contract.manifest import TensorRef
from specctl.draft import DraftCheckpoint
from specctl.ops.load import Loaded, located

WeightStep = Callable[[str, int, int], None]
"""Takes a file's name, the bytes read and the bytes to read."""


def deep_findings(
    loaded: Loaded, target: Loaded | None, step: WeightStep
) -> tuple[Diagnostic, ...]:
    """Return SD520 to SD529, and SD532, of a source; a file that cannot be read is a finding too.

    Args:
        loaded: a draft, completed by its target when there is one, or a target.
        target: the draft's target, for what is compared with it; None without one.
        step: called before every tensor.
    """
    found: list[Diagnostic] = []
    try:
        found += check_numbers(_reading(loaded, target), _counter(loaded.checkpoint, step))
        zero = {d.where for d in found if d.code == "SD521"}
        if loaded.draft is not None and target is not None:
            found += _beside_target(loaded.checkpoint, loaded.draft, target, zero)
    except DiagnosticError as error:
        found += error.diagnostics
    return located(found, loaded.source, target=None if target is None else target.source)


def map_row_findings(draft: Loaded, target: Loaded) -> tuple[Diagnostic, ...]:
    """Return SD532 of a draft with a stored map; a few hundred rows of both heads are read.

    Args:
        draft: completed by the target.
        target: its target.
    """
    facts, owner = draft.draft, target.target
    if facts is None or owner is None:
        return ()
    try:
        found = tuple(_map_rows(draft.checkpoint, facts, target))
    except DiagnosticError as error:
        found = error.diagnostics
    return located(found, draft.source, target=target.source)


def _map_rows(
    checkpoint: Checkpoint, draft: DraftCheckpoint, target: Loaded
) -> Iterator[Diagnostic]:
    ids, ref = draft.draft_to_target, map_tensor(draft)
    ours = _table(checkpoint, draft.tensors.get("head"))
    theirs = _table(target.checkpoint, None if target.target is None else target.target.head)
    if draft.map_kind != "reduced":
        return
    if ids is not None and ref is not None and ours is not None and theirs is not None:
        yield from check_map_rows(ours, theirs, ids, tensor_place(ref))


def _counter(checkpoint: Checkpoint, step: WeightStep) -> Callable[[TensorEntry], None]:
    total = sum(entry.nbytes for entry in checkpoint.tensors.values())
    done = 0

    def count(entry: TensorEntry) -> None:
        nonlocal done
        step(entry.file, done, total)
        done += entry.nbytes

    return count


def _reading(loaded: Loaded, target: Loaded | None) -> Reading:
    roles: dict[str, str] = {}
    for facts in (loaded.bundled, loaded.draft, loaded.target):
        roles |= {} if facts is None else {ref.key: role for role, ref in facts.tensors.items()}
    draft = loaded.draft or loaded.bundled
    return Reading(
        checkpoint=loaded.checkpoint,
        roles=roles,
        num_real_rows=_real_rows(loaded, target),
        mask_token_id=None if draft is None else draft.mask_token_id,
        has_mask_file=MASK_EMBEDDING in loaded.checkpoint.file_names,
    )


def _real_rows(loaded: Loaded, target: Loaded | None) -> Mapping[str, int]:
    """Return role -> rows that are tokens; the tokenizer says so, else the draft's config."""
    owner = loaded.target or (None if target is None else target.target)
    entries = None if owner is None else owner.tokenizer_size
    draft = loaded.draft
    if draft is None:
        return {} if entries is None else {"embedding": entries, "head": entries}
    ids = entries if entries is not None else draft.target_vocab_size
    rows = {"embedding": ids, "head": draft.draft_vocab_size}
    if draft.map_kind != "reduced":
        rows["head"] = ids
    return {role: count for role, count in rows.items() if count is not None}


def _beside_target(
    checkpoint: Checkpoint, draft: DraftCheckpoint, target: Loaded, zero: set[str]
) -> Iterator[Diagnostic]:
    if target.target is None:
        return
    theirs = {"embedding": target.target.embedding, "head": target.target.head}
    roles: tuple[Literal["embedding", "head"], ...] = ("embedding", "head")
    for role in roles:
        ours = _table(checkpoint, draft.tensors.get(role))
        other = _table(target.checkpoint, theirs[role])
        if ours is None or other is None or ours.entry.describe() in zero:
            continue
        is_reduced = role == "head" and draft.map_kind == "reduced"
        if not is_reduced or draft.draft_to_target is not None:
            ids = draft.draft_to_target if is_reduced else None
            wrong = tuple(_map_rows(checkpoint, draft, target)) if is_reduced else ()
            yield from wrong or check_likeness(role, ours, other, ids)
    embedding = _table(target.checkpoint, target.target.embedding)
    if embedding is not None and not draft.has_own_embedding and draft.mask_token_id is not None:
        has_file = MASK_EMBEDDING in checkpoint.file_names
        yield from () if has_file else check_mask_row(embedding, draft.mask_token_id)


def _table(checkpoint: Checkpoint, ref: TensorRef | None) -> Table | None:
    entry = None if ref is None else checkpoint.tensors.get(ref.key)
    return None if entry is None else Table(checkpoint=checkpoint, entry=entry)
