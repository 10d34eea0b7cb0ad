"""Read a list of allowed target ids and check that it fits a draft and its target.

Invariants: the order of the file is the order of draft ids; nothing is sorted, dropped or added.
Formats: a JSON list, a `.pt` list or 1-d tensor (read without executing it), a safetensors `d2t`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specctl.checkpoint import digest_file, read_pt_ints
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.manifest import Origin
from specctl.draft import DraftCheckpoint, TargetCheckpoint


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
        names = ("draft_vocab_size", "map_kind", "map_tensor", "map_digest", "token_map_file",
                 "token_map_digest")  # fmt: skip
        return {f"vocabulary.{name}": given for name in names}


def read_token_map(
    path: str, *, draft: DraftCheckpoint, target: TargetCheckpoint
) -> tuple[TokenMap | None, list[Diagnostic]]:
    """Return the map, None when it has errors, and what is wrong with it.

    Diagnostics: SD402 (id outside the target), SD404 (id twice), SD406 (an end id is absent), SD715
    (no list of ids, or a map that the draft's own head rows contradict).

    Args:
        path: the file.
        draft: whose head rows it must fit.
        target: whose vocabulary it selects from.
    """
    try:
        ids = _read_ids(Path(path))
        digest = digest_file(Path(path), where=path)
    except DiagnosticError as error:
        return None, list(error.diagnostics)
    findings = [
        *_check_ids(ids, path, target.vocab_size or 0),
        *_check_draft(ids, path, draft),
        *_check_end_ids(ids, path, target),
    ]
    if has_errors(findings):
        return None, findings
    return TokenMap(path=path, digest=digest, ids_target=ids), findings


def _read_ids(path: Path) -> tuple[int, ...]:
    if path.suffix == ".pt":
        return read_pt_ints(path)
    if path.suffix != ".json":
        raise DiagnosticError(_unusable(str(path), "`.json` or `.pt`", f"`{path.suffix}`"))
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        found = error.strerror or "a file that cannot be read"
        raise DiagnosticError(_unusable(str(path), "a readable file", found)) from error
    except (ValueError, RecursionError) as error:
        raise DiagnosticError(_unusable(str(path), "a JSON list of ids", "no JSON")) from error
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DiagnosticError(_unusable(str(path), "a JSON list of integers", "something else"))
    return tuple(values)


def _unusable(path: str, expected: str, found: str) -> Diagnostic:
    return diagnose(
        "SD715",
        where=f"{path}#",
        message="the token map cannot be used",
        expected=expected,
        found=found,
    )


def _check_ids(ids: tuple[int, ...], path: str, size: int) -> list[Diagnostic]:
    findings: list[Diagnostic] = []
    if not 0 < len(ids) < size:
        findings.append(_unusable(path, f"1 to {size - 1} ids", f"{len(ids)} ids"))
    seen: set[int] = set()
    for index, token in enumerate(ids):
        if not 0 <= token < size:
            findings.append(
                diagnose(
                    "SD402",
                    where=f"{path}#/{index}",
                    message=f"target id {token} does not exist",
                    expected=f"0 to {size - 1}",
                    found=token,
                )
            )
            break
        if token in seen:
            findings.append(
                diagnose(
                    "SD404",
                    where=f"{path}#/{index}",
                    message=f"target id {token} occurs twice",
                    expected="each id once",
                    found=token,
                )
            )
            break
        seen.add(token)
    return findings


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
