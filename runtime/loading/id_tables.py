"""How many rows a draft's tables over ids have, where its padding is not the target's.

`specctl.contract.padding_rows` says which rows are padding. Rows that a table has beyond the
target's are read and never looked up. Rows that it lacks are zeros: no draft is one of them, but a
prompt may hold any id below the target's rows, and its row is then looked up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.models.layers import Shapes
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import Draft, Manifest
from specctl.contract.padding_rows import has_token_rows, misses_row
from specctl.contract.roles import find_role, roles_of_draft

_BY_DRAFT_ID = ("head", "markov_w2")  # a row for each draft id, or for each target id


def wanted_rows(manifest: Manifest, role: str) -> int:
    """Return the rows that a table over ids is to have: those stored, if they can be right.

    A head over a reduced vocabulary has a row for each draft id, or for each token of the target.
    """
    facts, vocabulary = manifest.draft, manifest.vocabulary
    assert facts is not None, "a table of a draft"
    stored = _stored_rows(facts, role)
    is_compact = role in _BY_DRAFT_ID and vocabulary.map_kind == "reduced"
    if is_compact and stored == vocabulary.draft_vocab_size:
        return stored
    rows = vocabulary.target_vocab_size
    if has_token_rows(stored, rows, manifest.target.tokenizer_size):
        return stored
    return vocabulary.draft_vocab_size if is_compact else rows


def with_stored_rows(manifest: Manifest, shapes: Shapes) -> Shapes:
    """Return the shapes of a draft's tensors with the rows of `wanted_rows` in tables over ids."""
    return {
        role: (wanted_rows(manifest, role), *shape[1:])
        if _is_table(manifest, role) and len(shape) > 1
        else shape
        for role, shape in shapes.items()
    }


def looked_up_rows(manifest: Manifest, shapes: Shapes) -> Mapping[str, int]:
    """Return role -> rows that a table needs for every id of a prompt; absent: as many as it has.

    Tables over draft ids are not among them: an id that they lack is no draft id.
    """
    rows = manifest.vocabulary.target_vocab_size
    return {
        role: rows
        for role in shapes
        if _is_table(manifest, role) and role not in _BY_DRAFT_ID and shapes[role][0] < rows
    }


def map_reach_problems(manifest: Manifest, ids_target_R: torch.Tensor) -> list[Diagnostic]:
    """Return SD402 for a map with an id for which a table over target ids has no row.

    Args:
        manifest: has a draft.
        ids_target_R: int64, the draft's vocabulary.
    """
    facts = manifest.draft
    assert facts is not None, "a table of a draft"
    highest, count = max(ids_target_R.tolist(), default=-1), ids_target_R.numel()
    stored = {role: _stored_rows(facts, role) for role in _BY_DRAFT_ID if role in facts.tensors}
    return [
        diagnose(
            "SD402",
            where=f"manifest#/draft/tensors/{role}",
            message=f"the map reaches target id {highest}, and `{facts.tensors[role].key}` has "
            f"{rows} rows",
            expected=f"ids below {rows}",
            found=highest,
        )
        for role, rows in stored.items()
        if misses_row(rows, count, highest)
    ]


def _is_table(manifest: Manifest, role: str) -> bool:
    """Tell whether a role's rows are ids of one of the vocabularies."""
    facts = manifest.draft
    assert facts is not None, "a table of a draft"
    entry = find_role(role, roles_of_draft(facts.algorithm, facts.decoder.num_layers))
    return entry is not None and entry.shape[0] in ("V", "R")


def _stored_rows(facts: Draft, role: str) -> int:
    """Return the rows of a stored tensor, 0 without one."""
    ref = facts.tensors.get(role)
    return ref.shape[0] if ref is not None and ref.shape else 0
