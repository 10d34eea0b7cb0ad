"""Take a user's token map and check that it fits a draft and its target.

Invariants: the order of the file is the order of draft ids; nothing is sorted, dropped or added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.manifest import Origin
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.ops.load import located
from specctl.tokenmap.files import read_token_map as read_ids

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

    Diagnostics: SD402, SD404, SD420 (the list), SD406 (an end id is absent), SD715 (the draft's own
    head rows contradict it, or it selects nothing).

    Args:
        path: the file.
        draft: whose head rows it must fit.
        target: whose vocabulary it selects from.
    """
    file = Path(path)
    try:
        ids = read_ids(file, target_vocab_size=target.vocab_size)
        digest = digest_file(file, where=file.name)
    except DiagnosticError as error:
        return None, list(located(error.diagnostics, str(file.parent)))
    findings = [
        *_check_size(ids, path, target.vocab_size or 0),
        *_check_draft(ids, path, draft),
        *_check_end_ids(ids, path, target),
    ]
    if has_errors(findings):
        return None, findings
    return TokenMap(path=path, digest=digest, ids_target=ids), findings


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


def _check_end_ids(ids: tuple[int, ...], path: str, target: TargetCheckpoint) -> list[Diagnostic]:
    missing = [token for token in target.eos_token_ids if token not in frozenset(ids)]
    if not missing:
        return []
    return [
        diagnose(
            "SD406",
            where=f"{path}#",
            message=f"end ids {missing} are not in the map",
            expected=f"all of {list(target.eos_token_ids)}",
            found=f"without {missing}",
        )
    ]
