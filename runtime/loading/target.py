"""Read a target: match its files with its facts, then build it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from runtime.loading.files import WeightFiles
from runtime.loading.match import Wanted, match_tensors
from runtime.loading.reader import TensorReader, refuse_errors
from runtime.loading.shards import shard_of
from runtime.loading.target_keys import target_keys
from runtime.models import TargetModel, target_shapes
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.codec import resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest, Target
from specctl.contract.stage_split import Stage

_HEAD_SUFFIX = "lm_head.weight"


def read_target(
    manifest: Manifest,
    manifest_dir: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    stage: Stage | None = None,
    ranks: Ranks = ONE_RANK,
    is_dummy: bool = False,
) -> tuple[TargetModel, tuple[Diagnostic, ...]]:
    """Return the target, or one rank's shard of one stage of it, and the warnings of its files.

    All tensors of the target are matched with its facts on every stage; the bytes of other stages
    and ranks are not read.

    Args:
        manifest: facts, files and keys.
        manifest_dir: directory that relative paths count from.
        device: where the weights go.
        dtype: of every weight.
        stage: None reads all of the target.
        ranks: of the stage.
        is_dummy: make the numbers up.

    Raises:
        DiagnosticError: SD501, SD503, SD508 (tensors), SD815 (keys), SD816 (tied head), SD101,
            SD104, SD132, SD135 (files).
    """
    facts = manifest.target
    directory = resolve_source(facts.source, manifest_dir)
    shapes = target_shapes(facts)
    keys = target_keys(facts, shapes)
    wanted = [Wanted(role=role, key=keys[role], shape=shape) for role, shape in shapes.items()]
    names = [file.file for file in facts.files]
    with WeightFiles(directory, names, device=device, is_dummy=is_dummy) as files:
        duplicate = _stored_tied_head(manifest, files)
        warnings = refuse_errors(
            match_tensors(
                wanted,
                files.tensors,
                optional_keys=() if duplicate is None else (duplicate,),
                source=facts.source,
            )
        )
        roles = _roles_of(stage, facts, keys)
        reader = TensorReader(files, roles, dtype=dtype, ranks=ranks)
        model = TargetModel.build(facts, reader, stage=stage, ranks=ranks)
        reader.assert_all_taken()
        held = model.embedding or model.head
        if duplicate is not None and held is not None and not is_dummy:
            _refuse_other_head(files, duplicate, facts.embedding.key, held.weight_RD, ranks)
    return model, warnings


def _roles_of(stage: Stage | None, facts: Target, keys: Mapping[str, str]) -> dict[str, str]:
    """Return role -> key of what a stage holds; a tied head on a stage of its own is a role too."""
    if stage is None:
        return dict(keys)
    roles = {
        role: key
        for role, key in keys.items()
        if role.startswith("layers.")
        and stage.first_layer <= int(role.split(".")[1]) < stage.end_layer
    }
    if stage.has_embedding:
        roles["embedding"] = keys["embedding"]
    if stage.has_head:
        roles["norm"] = keys["norm"]
        if not facts.is_head_tied:
            roles["head"] = keys["head"]
        elif not stage.has_embedding:
            roles["head"] = keys["embedding"]
    return roles


def _stored_tied_head(manifest: Manifest, files: WeightFiles) -> str | None:
    """Return the key of a head that is stored although the embedding serves as the head."""
    if not manifest.target.is_head_tied:
        return None
    return next((key for key in files.tensors if key.endswith(_HEAD_SUFFIX)), None)


def _refuse_other_head(
    files: WeightFiles, head_key: str, embedding_key: str, rows_RD: torch.Tensor, ranks: Ranks
) -> None:
    """Compare the stored head with the rows that this rank uses as head, which were read already.

    Raises:
        DiagnosticError: SD816, they differ.
    """
    shard = shard_of("head", files.tensors[head_key].shape, ranks)
    if torch.equal(files.read(head_key, rows_RD.dtype, shard), rows_RD):
        return
    raise DiagnosticError(
        diagnose(
            "SD816",
            where=files.tensors[head_key].place,
            message=f"the head is tied, but `{head_key}` is stored with other numbers",
            expected=f"a copy of `{embedding_key}`, or no stored head",
            found="other values",
        )
    )
