"""Take a user's token map and check that it fits a draft and its target.

Invariants: the order of the file is the order of draft ids; nothing is sorted, dropped or added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import Diagnostic, diagnose, has_errors
from specctl.contract.manifest import Origin
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.ops.token_map_check import check_token_map

_GIVEN_FACTS = (
    "draft_vocab_size", "map_kind", "map_tensor", "map_digest", "token_map_file", "token_map_digest"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMap:
    """A map given by the user.

    Args:
        path: file, as the user wrote it.
        digest: `sha256:` of its bytes.
        ids_target: absolute target ids in draft-id order.
    """

    path: str
    digest: str
    ids_target: tuple[int, ...]

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Origins of the vocabulary facts that the file gives."""
        given = Origin(kind="given", where=f"--token-map {Path(self.path).name}")
        return {f"vocabulary.{name}": given for name in _GIVEN_FACTS}


def read_token_map(
    path: str, *, draft: DraftCheckpoint, target: TargetCheckpoint
) -> tuple[TokenMap | None, list[Diagnostic]]:
    """Return the map, None when it has errors, and what is wrong with it.

    Diagnostics: those of `check_token_map`, and SD715 (the draft's own head rows contradict it, or
    it selects nothing). An entry that repeats another is an error in every form here, because each
    entry becomes a row of the draft's head.

    Args:
        path: the file.
        draft: whose head rows it must fit.
        target: whose vocabulary it selects from.
    """
    judged = check_token_map(path, target)
    findings = [_of_a_head(item) for item in judged.diagnostics if item.code != "SD441"]
    ids = judged.ids_target
    if ids is not None:
        findings += _check_size(ids, path, target.vocab_size or 0)
        findings += _check_draft(ids, path, draft)
    if ids is None or has_errors(findings):
        return None, findings
    digest = digest_file(Path(path), where=path)
    return TokenMap(path=path, digest=digest, ids_target=ids), findings


def _of_a_head(item: Diagnostic) -> Diagnostic:
    """Return a finding about a list as one about the rows of a head."""
    if item.code != "SD404":
        return item
    return msgspec.structs.replace(item, severity="error")


def _check_size(ids: tuple[int, ...], path: str, size: int) -> list[Diagnostic]:
    if len(ids) < size:
        return []
    return [
        diagnose(
            "SD715",
            where=f"{path}#",
            message="the token map holds the whole target vocabulary",
            expected=f"fewer than {size} ids",
            found=f"{len(ids)} ids",
            help="Leave `--token-map` out: the draft then proposes over all target ids",
        )
    ]


def _check_draft(ids: tuple[int, ...], path: str, draft: DraftCheckpoint) -> list[Diagnostic]:
    own = draft.draft_to_target if draft.map_kind == "reduced" else None
    if own is None or own == ids:
        return []
    num_equal = sum(1 for left, right in zip(own, ids, strict=False) if left == right)
    return [
        diagnose(
            "SD715",
            where=f"{path}#",
            message="the draft's head has its own map and this is another one",
            expected=f"the {len(own)} ids of the draft's `d2t`, in its order",
            found=f"{len(ids)} ids, {num_equal} of them in the same place",
            help="Leave `--token-map` out: the rows of this head are fixed by `d2t`",
        )
    ]
