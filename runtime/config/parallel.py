"""How many tensor-parallel ranks hold target and draft, and what does not work over several."""

from __future__ import annotations

from runtime.config.ledger import Ledger
from runtime.config.values import DRAFT_PROPOSERS, ProposerName
from specctl.contract.manifest import Manifest
from specctl.contract.rank_split import rank_problems


def settle_ranks(ledger: Ledger, manifest: Manifest, proposer: ProposerName) -> tuple[int, int]:
    """Return `tensor_parallel` and `draft_tensor_parallel`.

    A draft is split like the target, or whole on every rank.

    Findings: SD852 (a dimension that the ranks do not divide), SD832 (another number of ranks for
    the draft), SD805.
    """
    size = ledger.pick("tensor_parallel", 1)
    has_draft = proposer in DRAFT_PROPOSERS
    if not has_draft and ledger.given.draft_tensor_parallel is not None:
        ledger.idle("draft_tensor_parallel", f"the proposer is `{proposer}`")
    if not has_draft:
        draft_size = ledger.note("draft_tensor_parallel", 1, "derived")
    else:
        draft_size = ledger.pick("draft_tensor_parallel", size, origin="derived")
    if draft_size not in (1, size):
        ledger.refuse(
            "SD832",
            "draft_tensor_parallel",
            f"`draft_tensor_parallel` is {draft_size}, the target has {size} ranks",
            expected="1" if size == 1 else f"1 or {size}",
            found=draft_size,
        )
        return size, draft_size
    if size > 1:
        is_draft_split = has_draft and draft_size > 1
        ledger.found += rank_problems(manifest, size, is_draft_split=is_draft_split)
    return size, draft_size


def refuse_over_ranks(ledger: Ledger, tensor_parallel: int) -> None:
    """Collect SD832 for settings that need a whole head, or facts that other ranks do not have.

    Dynamic rows look single rows of the target's head up; a forced anchor layout is known to the
    process that was given it. (Draft counts that follow measured costs are refused with stages.)
    """
    if tensor_parallel == 1:
        return
    given = ledger.given
    refused: tuple[tuple[str, object, object], ...] = (
        ("dynamic_rows", given.dynamic_rows or 0, 0),
        ("dynamic_rank", given.dynamic_rank or 0, 0),
        ("force_anchor_layout", given.force_anchor_layout, None),
    )
    for name, found, expected in refused:
        if found != expected:
            ledger.refuse(
                "SD832",
                name,
                f"`{name}` is {found}, which {tensor_parallel} tensor-parallel ranks cannot run",
                expected="`--tp 1`" if expected is None else f"{expected}, or `--tp 1`",
                found=found,
            )
