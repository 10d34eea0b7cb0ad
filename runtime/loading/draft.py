"""Read a draft: its own tensors, and what it shares with the target.

The manifest says where the embedding and the head come from. A stage that holds the target's
embedding shares that tensor; a stage without it reads the rows from the target's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from runtime.loading.draft_embedding import (
    embedding_origin,
    embedding_problems,
    embedding_ref,
    log_embedding,
)
from runtime.loading.files import WeightFiles
from runtime.loading.id_tables import looked_up_rows, wanted_rows, with_stored_rows
from runtime.loading.match import FLOAT_DTYPES, ID_DTYPES, MASK_DTYPES, Wanted, match_tensors
from runtime.loading.reader import TensorReader, refuse_errors
from runtime.loading.shards import shard_of
from runtime.loading.vocabulary import read_draft_to_target
from runtime.models import (
    BlockModel,
    DraftModel,
    Eagle1Model,
    Eagle3Model,
    MtpModel,
    PEagleModel,
    TargetModel,
    VocabEmbedding,
    VocabHead,
    block_shapes,
    eagle1_shapes,
    eagle3_shapes,
    mtp_shapes,
    peagle_shapes,
    pick_rows,
)
from runtime.models.layers import Shapes, TensorSource
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.codec import resolve_source
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import BLOCK_DRAFTS, Draft, Manifest, Sharing, Target, TensorRef
from specctl.contract.stage_split import DraftEmbedding

# Roles that a file may hold without the model being built from them by role.
_OPTIONAL_ROLES = ("embedding", "head", "d2t", "t2d")

Part = Literal["embedding", "head"]


def read_draft(
    manifest: Manifest,
    manifest_dir: Path,
    *,
    target: TargetModel | None,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks = ONE_RANK,
    is_dummy: bool = False,
) -> tuple[DraftModel, tuple[Diagnostic, ...]]:
    """Return the draft and the warnings of its files (SD502, SD521).

    Args:
        manifest: has a draft whose algorithm the runtime runs.
        manifest_dir: directory that relative paths count from.
        target: what this stage holds of the target, None for nothing.
        device: where the weights go.
        dtype: of every weight.
        ranks: over which the draft is split; what it shares with the target stays as that is.
        is_dummy: make the numbers up.

    Raises:
        DiagnosticError: SD801, SD858 (embedding), SD501, SD503, SD508, SD509 (tensors), SD402,
            SD405, SD702 (map), SD101, SD104, SD132, SD135 (files).
    """
    facts, sharing = manifest.draft, manifest.sharing
    assert facts is not None, "a draft is read from a manifest that has one"
    assert sharing is not None, "a manifest with a draft says what it shares"
    directory = resolve_source(facts.source, manifest_dir)
    origin = embedding_origin(manifest, target)
    names = [file.file for file in facts.files]
    with WeightFiles(directory, names, device=device, is_dummy=is_dummy) as files:
        refuse_errors(embedding_problems(manifest, files.tensors, origin))
        builder = builder_of(manifest, facts)
        shapes = with_stored_rows(manifest, builder.shapes(facts))
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
            ranks=ranks,
            is_dummy=is_dummy,
        )
        reader = TensorReader(
            files,
            {role: facts.tensors[role].key for role in shapes},
            dtype=dtype,
            ranks=ranks,
            least_rows=looked_up_rows(manifest, shapes),
        )
        embedding, head = shared.embedding(origin), shared.head(sharing.head, draft_to_target)
        if origin == "own":
            reader.note(facts.tensors["embedding"].key, embedding.weight_RD)
        if sharing.head == "own":
            reader.note(facts.tensors["head"].key, head.weight_RD)
        model = builder.build(
            facts,
            reader,
            embedding=embedding,
            head=head,
            draft_to_target_R=draft_to_target.to(device),
            num_positions=max(
                facts.decoder.max_position_embeddings,
                manifest.target.decoder.max_position_embeddings,
            ),
            ranks=ranks,
        )
        reader.assert_all_taken()
    log_embedding(embedding_ref(manifest, origin), origin, parameter="embedding.weight_RD")
    return model, (*warnings, *reader.zero_weights)


class _Build(Protocol):
    """Builds a draft of its tensors and what it shares with the target."""

    def __call__(
        self,
        facts: Draft,
        take: TensorSource,
        *,
        embedding: VocabEmbedding,
        head: VocabHead,
        draft_to_target_R: torch.Tensor,
        num_positions: int,
        ranks: Ranks,
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
    ranks: Ranks
    is_dummy: bool

    def embedding(self, origin: DraftEmbedding) -> VocabEmbedding:
        """Return the input embedding; the target's own tensor when it is shared."""
        if origin == "target" and self.target is not None and self.target.embedding is not None:
            return self.target.embedding
        if origin == "head" and self.target is not None and self.target.head is not None:
            return VocabEmbedding(
                weight_RD=self.target.head.weight_RD, ranks=self.target.head.ranks
            )
        if origin == "own":
            rows = self._read(self.files, self.facts.tensors["embedding"].key, "embedding")
        else:
            rows = self._from_target_files(self.target_facts.embedding, "embedding")
        return VocabEmbedding(weight_RD=rows, ranks=self.ranks)

    def head(self, origin: Literal["own", "target"], ids_target_R: torch.Tensor) -> VocabHead:
        """Return the head over draft ids; rows that a map names are copied, in draft-id order."""
        count = ids_target_R.numel()
        if origin == "target" and self.target is not None and self.target.head is not None:
            head = self.target.head
            if _is_prefix(ids_target_R):
                return replace(head, num_ids=count)
            return pick_rows(head, ids_target_R, self.ranks)
        own = origin == "own"
        ref = self.facts.tensors["head"] if own else self.target_facts.head
        # Rows of a full head that a map names lie on any rank: it is read whole, then cut.
        is_cut = ref.shape[0] != count and not _is_prefix(ids_target_R)
        part: Part | None = None if is_cut else "head"
        rows = self._read(self.files, ref.key, part) if own else self._from_target_files(ref, part)
        if is_cut:
            whole = VocabHead(weight_RD=rows, num_ids=rows.shape[0], ranks=ONE_RANK)
            return pick_rows(whole, ids_target_R, self.ranks)
        return VocabHead(weight_RD=rows, num_ids=count, ranks=self.ranks)

    def _from_target_files(self, ref: TensorRef, part: Part | None) -> torch.Tensor:
        with WeightFiles(
            self.target_directory, [ref.file], device=self.device, is_dummy=self.is_dummy
        ) as files:
            return self._read(files, ref.key, part)

    def _read(self, files: WeightFiles, key: str, part: Part | None) -> torch.Tensor:
        """Return this rank's rows of a vocabulary, or all rows where `part` is None."""
        if part is None:
            return files.read(key, self.dtype)
        least = self.target_facts.vocab_size if part == "embedding" else 0
        shard = shard_of(part, files.tensors[key].shape, self.ranks, least_rows=least)
        return files.read(key, self.dtype, shard)


def _is_prefix(ids_target_R: torch.Tensor) -> bool:
    """Tell whether draft ids are target ids."""
    return torch.equal(ids_target_R, torch.arange(ids_target_R.numel()))


def _wanted(
    facts: Draft, role: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOAT_DTYPES
) -> Wanted:
    ref = facts.tensors.get(role)
    return Wanted(role=role, key=None if ref is None else ref.key, shape=shape, dtypes=dtypes)


def _wanted_vocabulary(
    manifest: Manifest, facts: Draft, sharing: Sharing, origin: DraftEmbedding
) -> list[Wanted]:
    """Return the embedding, head and map tensors that this stage reads from the draft's files."""
    vocabulary, hidden = manifest.vocabulary, facts.decoder.hidden_size
    wanted = []
    if origin == "own":
        wanted.append(_wanted(facts, "embedding", (wanted_rows(manifest, "embedding"), hidden)))
    if sharing.head == "own":
        wanted.append(_wanted(facts, "head", (wanted_rows(manifest, "head"), hidden)))
    if vocabulary.map_tensor is not None and vocabulary.token_map_file is None:
        wanted.append(_wanted(facts, "d2t", (vocabulary.draft_vocab_size,), ID_DTYPES))
        if "t2d" in facts.tensors:
            # The draft may count other padding rows than the target: which ids it marks decides.
            mask = facts.tensors["t2d"]
            rows = mask.shape[0] if mask.shape else vocabulary.target_vocab_size
            wanted.append(_wanted(facts, "t2d", (rows,), MASK_DTYPES))
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
