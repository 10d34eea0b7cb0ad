"""Read a draft: its own tensors, and what it shares with the target.

The manifest says where the embedding and the head come from. A stage that holds the target's
embedding shares that tensor; a stage without it reads the rows from the target's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from runtime.loading.files import WeightFiles
from runtime.loading.match import FLOAT_DTYPES, ID_DTYPES, MASK_DTYPES, Wanted, match_tensors
from runtime.loading.reader import TensorReader, refuse_errors
from runtime.loading.vocabulary import read_draft_to_target
from runtime.models import (
    BlockModel,
    DraftModel,
    Eagle1Model,
    Eagle3Model,
    MtpModel,
    PEagleModel,
    TargetModel,
    block_shapes,
    eagle1_shapes,
    eagle3_shapes,
    mtp_shapes,
    peagle_shapes,
)
from runtime.models.layers import Shapes, TensorSource
from specctl.contract.codec import resolve_source
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import BLOCK_DRAFTS, Draft, Manifest, Sharing, Target, TensorRef

# Roles that a file may hold without the model being built from them by role.
_OPTIONAL_ROLES = ("embedding", "head", "d2t", "t2d")

Origin = Literal["own", "target", "checkpoint"]


def read_draft(
    manifest: Manifest,
    manifest_dir: Path,
    *,
    target: TargetModel | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[DraftModel, tuple[Diagnostic, ...]]:
    """Return the draft and the warnings of its files.

    Args:
        manifest: has a draft whose algorithm the runtime runs.
        manifest_dir: directory that relative paths count from.
        target: the loaded target, None on a stage that does not hold its embedding and head.
        device: where the weights go.
        dtype: of every weight.

    Raises:
        DiagnosticError: SD501, SD503, SD508, SD509 (tensors), SD402, SD405, SD702 (map), SD101,
            SD104, SD132, SD135 (files).
    """
    facts, sharing = manifest.draft, manifest.sharing
    assert facts is not None, "a draft is read from a manifest that has one"
    assert sharing is not None, "a manifest with a draft says what it shares"
    directory = resolve_source(facts.source, manifest_dir)
    origin = embedding_origin(sharing, target)
    with WeightFiles(directory, [file.file for file in facts.files], device=device) as files:
        builder = builder_of(manifest, facts)
        shapes = builder.shapes(facts)
        wanted = [
            *(_wanted(facts, role, shape) for role, shape in shapes.items()),
            *_wanted_vocabulary(manifest, facts, sharing, origin),
        ]
        optional = [ref.key for role, ref in facts.tensors.items() if role in _OPTIONAL_ROLES]
        found = match_tensors(wanted, files.tensors, optional_keys=optional, source=facts.source)
        warnings = refuse_errors([*_sharing_problems(manifest, facts, sharing), *found])
        draft_to_target = read_draft_to_target(manifest, manifest_dir, files)
        shared = _Shared(
            facts=facts,
            target_facts=manifest.target,
            target_directory=resolve_source(manifest.target.source, manifest_dir),
            files=files,
            target=target,
            device=device,
            dtype=dtype,
        )
        reader = TensorReader(
            files, {role: facts.tensors[role].key for role in shapes}, dtype=dtype
        )
        model = builder.build(
            facts,
            reader,
            embedding_VH=shared.embedding(origin),
            head_RH=shared.head(sharing.head, draft_to_target),
            draft_to_target_R=draft_to_target.to(device),
            num_positions=max(
                facts.decoder.max_position_embeddings,
                manifest.target.decoder.max_position_embeddings,
            ),
        )
        reader.assert_all_taken()
    return model, warnings


class _Build(Protocol):
    """Builds a draft of its tensors and what it shares with the target."""

    def __call__(
        self,
        facts: Draft,
        take: TensorSource,
        *,
        embedding_VH: torch.Tensor,
        head_RH: torch.Tensor,
        draft_to_target_R: torch.Tensor,
        num_positions: int,
    ) -> DraftModel:
        """Return the model."""


class Builder(NamedTuple):
    """Which tensors a kind of draft is built from, and how."""

    shapes: Callable[[Draft], Shapes]
    build: _Build


BUILDERS: Mapping[str, Builder] = {
    "eagle": Builder(eagle1_shapes, Eagle1Model.build),
    "eagle3": Builder(eagle3_shapes, Eagle3Model.build),
    "mtp": Builder(mtp_shapes, MtpModel.build),
    "peagle": Builder(peagle_shapes, PEagleModel.build),
}
"""Algorithm -> how its draft is built; block drafts need more than their own section."""


def builder_of(manifest: Manifest, facts: Draft) -> Builder:
    """Return how the manifest's draft is built."""
    if facts.algorithm in BLOCK_DRAFTS:
        return Builder(
            partial(block_shapes, vocabulary=manifest.vocabulary),
            partial(BlockModel.build, geometry=manifest.geometry),
        )
    return BUILDERS[facts.algorithm]


def embedding_origin(sharing: Sharing, target: TargetModel | None) -> Origin:
    """Return where the draft's input embedding comes from on this stage."""
    if target is None:
        return sharing.embedding_multi_stage
    return sharing.embedding_single_stage


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shared:
    """Reads what may be the draft's own, the loaded target's, or in the target's files."""

    facts: Draft
    target_facts: Target
    target_directory: Path
    files: WeightFiles
    target: TargetModel | None
    device: torch.device
    dtype: torch.dtype

    def embedding(self, origin: Origin) -> torch.Tensor:
        """Return [V, H]; the target's own tensor when it is shared."""
        if origin == "own":
            return self.files.read(self.facts.tensors["embedding"].key, self.dtype)
        if origin == "target" and self.target is not None:
            return self.target.embedding_VD
        return self._from_target_files(self.target_facts.embedding)

    def head(self, origin: Literal["own", "target"], ids_target_R: torch.Tensor) -> torch.Tensor:
        """Return [R, H]; the rows of a full head that a map names are copied, in draft-id order."""
        if origin == "own":
            head = self.files.read(self.facts.tensors["head"].key, self.dtype)
        elif self.target is not None:
            head = self.target.head_VD
        else:
            head = self._from_target_files(self.target_facts.head)
        count = ids_target_R.numel()
        if head.shape[0] == count:
            return head
        if torch.equal(ids_target_R, torch.arange(count)):
            return head[:count]
        return head[ids_target_R.to(head.device)]

    def _from_target_files(self, ref: TensorRef) -> torch.Tensor:
        with WeightFiles(self.target_directory, [ref.file], device=self.device) as files:
            return files.read(ref.key, self.dtype)


def _wanted(
    facts: Draft, role: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOAT_DTYPES
) -> Wanted:
    ref = facts.tensors.get(role)
    return Wanted(role=role, key=None if ref is None else ref.key, shape=shape, dtypes=dtypes)


def _wanted_vocabulary(
    manifest: Manifest, facts: Draft, sharing: Sharing, origin: Origin
) -> list[Wanted]:
    """Return the embedding, head and map tensors that this stage reads from the draft's files."""
    vocabulary, hidden = manifest.vocabulary, facts.decoder.hidden_size
    wanted = []
    if origin == "own":
        wanted.append(_wanted(facts, "embedding", (vocabulary.target_vocab_size, hidden)))
    if sharing.head == "own":
        ref = facts.tensors.get("head")
        is_full = ref is not None and ref.shape[0] == vocabulary.target_vocab_size
        rows = vocabulary.target_vocab_size if is_full else vocabulary.draft_vocab_size
        wanted.append(_wanted(facts, "head", (rows, hidden)))
    if vocabulary.map_tensor is not None and vocabulary.token_map_file is None:
        wanted.append(_wanted(facts, "d2t", (vocabulary.draft_vocab_size,), ID_DTYPES))
        if "t2d" in facts.tensors:
            wanted.append(_wanted(facts, "t2d", (vocabulary.target_vocab_size,), MASK_DTYPES))
    return wanted


def _sharing_problems(manifest: Manifest, facts: Draft, sharing: Sharing) -> list[Diagnostic]:
    hidden, target_hidden = facts.decoder.hidden_size, manifest.target.decoder.hidden_size
    is_shared = "own" not in (sharing.embedding_single_stage, sharing.embedding_multi_stage)
    if hidden == target_hidden or not (is_shared or sharing.head == "target"):
        return []
    return [
        diagnose(
            "SD509",
            where="manifest#/sharing",
            message=f"the draft is {hidden} wide and cannot use rows of width {target_hidden}",
            expected=f"an embedding and a head of width {hidden} in the draft's files",
            found=f"the target's, width {target_hidden}",
        )
    ]
