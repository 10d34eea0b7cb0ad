"""The draft's vocabulary as the runtime uses it: absolute target ids in draft-id order.

The map is read from its source again and must have the manifest's digest: a map that is off by one
entry proposes wrong words without any error.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from runtime.loading.files import WeightFiles
from runtime.loading.id_tables import map_reach_problems
from specctl.contract.codec import resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest, Vocabulary
from specctl.contract.padding_rows import num_token_rows
from specctl.contract.vocabulary_map import map_digest


def read_draft_to_target(
    manifest: Manifest, manifest_dir: Path, draft_files: WeightFiles
) -> torch.Tensor:
    """Return int64 [R] on the CPU: the target id of each draft id.

    Without a map these are the ids that the target itself can choose: rows above the tokenizer only
    pad the matrices, and a draft that proposed one would always be wrong.

    Args:
        manifest: says which kind of map there is and where.
        manifest_dir: directory that relative paths count from.
        draft_files: hold `d2t` when that is the source.

    Raises:
        DiagnosticError: SD702 (not the map that the manifest describes), SD402 (an id outside the
            target's vocabulary, or for which the draft's head has no row), SD405 (`t2d` marks
            other ids).
    """
    vocabulary = manifest.vocabulary
    if vocabulary.map_kind == "identity":
        rows = vocabulary.target_vocab_size
        return torch.arange(num_token_rows(rows, manifest.target.tokenizer_size))
    if vocabulary.token_map_file is not None:
        path = resolve_source(vocabulary.token_map_file, manifest_dir)
        ids, where = _read_token_map(path), f"{path}#"
    else:
        assert vocabulary.map_tensor is not None, "a reduced map has a tensor or a file"
        key = vocabulary.map_tensor.key
        offsets = draft_files.read(key, torch.int64).cpu()
        ids, where = torch.arange(offsets.numel()) + offsets, draft_files.tensors[key].place
    problems = _map_problems(ids, vocabulary, where) or map_reach_problems(manifest, ids)
    if not problems and vocabulary.token_map_file is None:
        problems = _mask_problems(ids, manifest, draft_files)
    if problems:
        raise DiagnosticError(problems)
    return ids


def _map_problems(ids: torch.Tensor, vocabulary: Vocabulary, where: str) -> list[Diagnostic]:
    found = map_digest(ids.tolist())
    if found != vocabulary.map_digest:
        return [
            diagnose(
                "SD702",
                where=where,
                message=f"the map of {ids.numel()} ids is not the one in the manifest",
                expected=vocabulary.map_digest,
                found=found,
            )
        ]
    size = vocabulary.target_vocab_size
    is_outside = (ids < 0) | (ids >= size)
    if is_outside.any():
        draft_id = int(is_outside.nonzero()[0])
        return [
            diagnose(
                "SD402",
                where=where,
                message=f"draft id {draft_id} maps to target id {int(ids[draft_id])}",
                expected=f"target ids in [0, {size})",
                found=int(ids[draft_id]),
            )
        ]
    return []


def _mask_problems(
    ids: torch.Tensor, manifest: Manifest, draft_files: WeightFiles
) -> list[Diagnostic]:
    assert manifest.draft is not None, "a reduced map belongs to a draft"
    mask = manifest.draft.tensors.get("t2d")
    if mask is None:
        return []
    marked = draft_files.read(mask.key).cpu().flatten().bool().nonzero().flatten()
    if torch.equal(marked, ids.sort().values):
        return []
    return [
        diagnose(
            "SD405",
            where=draft_files.tensors[mask.key].place,
            message=f"`{mask.key}` marks {marked.numel()} ids, `d2t` maps {ids.numel()}",
            expected="the same set of target ids",
            found=f"{_num_common(marked, ids)} in common",
        )
    ]


def _num_common(first: torch.Tensor, second: torch.Tensor) -> int:
    return int(torch.isin(first, second).sum())


def _read_token_map(path: Path) -> torch.Tensor:
    """Return int64 [R] from a JSON list, a `.pt` list or tensor, or a safetensors `d2t`."""
    if path.suffix == ".safetensors":
        with WeightFiles(path.parent, [path.name], device=torch.device("cpu")) as files:
            offsets = files.read("d2t", torch.int64)
        return torch.arange(offsets.numel()) + offsets
    if path.suffix == ".json":
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    else:
        values = torch.load(path, map_location="cpu", weights_only=True)
    return torch.as_tensor(values, dtype=torch.int64)
