"""The normalized in-memory forms of a target and a draft: facts and a tensor table, no weights.

Invariants: values are frozen and built whole by a reader of `specctl.formats`. A fact that the
files do not state and no rule of the format fixes is None ("open"); it is never guessed. Every fact
that is not None has an origin under its manifest path (`draft.aux_layer_ids`, `geometry`, ...),
found by longest prefix. `diagnostics` holds the reader's own findings only: those of the container
are in `Checkpoint.diagnostics`, those of the checks are returned by `specctl.checks`; no finding is
in two of them.
Aux layer ids are 0-based and mean the output of that layer; -1 is the embedding output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specctl.contract.block_facts import block_facts, foreign_details
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import (
    LAST_STATE_DRAFTS,
    Decoder,
    Draft,
    DraftAlgorithm,
    Geometry,
    MarkovHead,
    Origin,
    Sharing,
    Target,
    TensorRef,
    WeightFile,
)
from specctl.contract.roles import ALWAYS, TensorRole, find_role, roles_of_draft

TargetFormat = Literal["huggingface"]
Role = Literal["target", "draft"]
AuxNumbering = Literal["boundary", "output"]
Algorithm = Literal[
    "eagle",
    "eagle3",
    "peagle",
    "dflash",
    "dflash2",
    "dspark",
    "domino",
    "xpress",
    "mtp",
    "gemma4_assistant",
    "medusa",
    "hydra",
    "mlp_speculator",
    "pard",
    "redrafter",
]

BLOCK_ALGORITHMS: tuple[Algorithm, ...] = ("dflash", "dflash2", "dspark", "domino", "xpress")
FIRST_EMBEDDINGS: Mapping[Algorithm, str] = {"mlp_speculator": "emb.0"}
"""Drafts with an embedding for each step -> role of the first."""
FIRST_HEADS: Mapping[Algorithm, str] = {
    "medusa": "heads.0.head",
    "hydra": "heads.0.head",
    "mlp_speculator": "head.0",
}
"""Drafts with an output head for each step -> role of the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """What kind of checkpoint a directory holds.

    Args:
        role: None when the format is unknown or contradictory (then `diagnostics` has the error).
        format: dialect that reads it, None as above.
        bundled: draft format of the prediction layers inside a target, None without any.
        evidence: config keys and tensor names that decided it.
    """

    role: Role | None
    format: str | None
    bundled: str | None
    evidence: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCheckpoint:
    """A target as read: every field of `contract.manifest.Target`, None where the files are silent.

    Args:
        root: directory it was read from.
        format: always `huggingface`.
        architecture: first entry of the config's `architectures`, empty when it has none.
        decoder: None when the architecture is not supported or a dimension is missing.
        vocab_size: rows of the embedding; the config's number when there is no embedding.
        declared_vocab_size: `vocab_size` of the config.
        tensors: canonical role -> tensor; roles are in `contract.roles`.
        unmapped: keys of the files that no role takes, sorted.
        num_layers: counted from tensors, else from the config; kept for other architectures.
        head_rule: how the head was decided, in words.
        decoys: copies of the embedding inside layers and draft parts, by key.
    """

    root: Path | None
    format: TargetFormat
    architecture: str
    config_digest: str | None
    dtype: str | None
    decoder: Decoder | None
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    declared_vocab_size: int | None
    tokenizer_size: int | None
    tokenizer_digest: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding: TensorRef | None
    head: TensorRef | None
    is_head_tied: bool | None
    head_rule: str
    decoys: tuple[TensorRef, ...]
    tensors: Mapping[str, TensorRef]
    unmapped: tuple[str, ...]
    files: tuple[WeightFile, ...]
    origins: Mapping[str, Origin]
    diagnostics: tuple[Diagnostic, ...]

    def to_target(self, *, source: str, revision: str | None) -> Target | None:
        """Return the manifest section, or None while a required fact is open."""
        if (
            self.config_digest is None
            or self.dtype is None
            or self.decoder is None
            or self.vocab_size is None
            or self.embedding is None
            or self.head is None
            or self.is_head_tied is None
        ):
            return None
        return Target(
            source=source,
            revision=revision,
            architecture=self.architecture,
            config_digest=self.config_digest,
            dtype=self.dtype,
            decoder=self.decoder,
            vocab_size=self.vocab_size,
            tokenizer_size=self.tokenizer_size,
            tokenizer_digest=self.tokenizer_digest,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            embedding=self.embedding,
            head=self.head,
            is_head_tied=self.is_head_tied,
            files=self.files,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCheckpoint:
    """A draft as read, whatever the dialect.

    Args:
        root: directory it was read from.
        architecture: first entry of the config's `architectures`, empty when it has none.
        target_name: hub id or path of the target it was made for, as the config names it.
        decoder: shape of the draft's own layers, None when a dimension is missing.
        hidden_size: draft width; kept here for the case that `decoder` is None.
        target_hidden_size: width of one captured target state.
        target_num_layers: layers of the target as the draft's file numbers them (MTP), else None.
        target_vocab_size: target ids the draft knows (its config's `vocab_size`, t2d rows).
        draft_vocab_size: rows of the draft's head; equal to the target's for an identity map.
        num_aux_states: captured target states that `fc` concatenates; None for MTP.
        declared_aux_ids: the list as written in the config, in `aux_numbering`.
        aux_layer_ids: the same in canonical numbering (0-based, output of that layer).
        declared_num_speculative_tokens: token count written in the config.
        geometry: None while the token count is open.
        d2t: on-disk vector as stored, without interpretation.
        t2d: on-disk mask [V], one byte per target id.
        draft_to_target: absolute target ids in draft-id order; None without a map tensor or
            when its encoding is not decided.
        details: what only this algorithm has, by the config's own names; for reports and writers.
        roles: table that says which tensors there are and which shape they have.
        sizes: shape symbol -> elements, over those that the fields above give; `X0` is the first
            layer's attention input.
        config: config.json's object as stored, for writers and engine verdicts.
        unknown_fields: pointers of config fields that no rule of the format reads.
        tensors: canonical role -> tensor.
        unmapped: keys of the files that no role takes, sorted.
    """

    root: Path | None
    format: str
    algorithm: Algorithm
    architecture: str
    target_name: str | None
    config_digest: str | None
    dtype: str | None
    decoder: Decoder | None
    hidden_size: int | None
    target_hidden_size: int | None
    target_num_layers: int | None
    target_vocab_size: int | None
    draft_vocab_size: int | None
    num_aux_states: int | None
    declared_aux_ids: tuple[int, ...] | None
    aux_layer_ids: tuple[int, ...] | None
    aux_numbering: AuxNumbering | None
    has_fc_bias: bool
    has_norm_before_residual: bool
    has_norm_before_fc: bool
    has_fc_norm: bool
    has_norm_output: bool
    mask_token_id: int | None
    markov: MarkovHead | None
    has_confidence_head: bool
    is_confidence_with_markov: bool
    declared_num_speculative_tokens: int | None
    sample_from_anchor: bool | None
    draft_block_size: int | None
    geometry: Geometry | None
    d2t: tuple[int, ...] | None
    t2d: bytes | None
    draft_to_target: tuple[int, ...] | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    details: Mapping[str, object]
    roles: tuple[TensorRole, ...]
    sizes: Mapping[str, int]
    config: Mapping[str, object]
    unknown_fields: tuple[str, ...]
    tensors: Mapping[str, TensorRef]
    unmapped: tuple[str, ...]
    files: tuple[WeightFile, ...]
    origins: Mapping[str, Origin]
    diagnostics: tuple[Diagnostic, ...]

    @property
    def is_block(self) -> bool:
        """Tell whether one forward fills a block of slots (DFlash, DSpark and relatives)."""
        return self.algorithm in BLOCK_ALGORITHMS

    @property
    def own_embedding(self) -> TensorRef | None:
        """The stored input embedding, the first step's of several; None without one."""
        first = FIRST_EMBEDDINGS.get(self.algorithm, "embedding")
        return self.tensors.get("embedding") or self.tensors.get(first)

    @property
    def own_head(self) -> TensorRef | None:
        """The stored output head, the first step's of several; None without one."""
        first = FIRST_HEADS.get(self.algorithm, "head")
        return self.tensors.get("head") or self.tensors.get(first)

    @property
    def captures_states(self) -> bool:
        """Tell whether it reads states of several target layers, not only the last one's."""
        return self.is_block or self.algorithm in ("eagle3", "peagle")

    @property
    def is_head_tied(self) -> bool:
        """Tell whether the algorithm makes logits with the draft's own embedding."""
        return self.algorithm == "gemma4_assistant"

    @property
    def reads_tokens(self) -> bool:
        """Tell whether it embeds tokens; Medusa's heads read states only."""
        return self.algorithm != "medusa"

    @property
    def has_own_embedding(self) -> bool:
        """Tell whether the draft's files hold an input embedding."""
        return "embedding" in self.tensors

    @property
    def has_own_head(self) -> bool:
        """Tell whether the draft's files hold an output head."""
        return "head" in self.tensors

    def sharing(self) -> Sharing:
        """Return where the draft's embedding and head come from, on one stage and on many."""
        return Sharing(
            embedding_single_stage="own" if self.has_own_embedding else "target",
            embedding_multi_stage="own" if self.has_own_embedding else "checkpoint",
            head="own" if self.has_own_head else "target",
        )

    @property
    def map_kind(self) -> Literal["identity", "reduced"] | None:
        """Return the kind of vocabulary map, None while a vocabulary size is open."""
        if self.target_vocab_size is None or self.draft_vocab_size is None:
            return None
        return "identity" if self.draft_vocab_size == self.target_vocab_size else "reduced"

    @property
    def foreign_details(self) -> tuple[str, ...]:
        """Return the stated fields that change a block draft's forward and no manifest can say."""
        return foreign_details(self.algorithm, self.details) if self.is_block else ()

    @property
    def _is_described_by_manifest(self) -> bool:
        """Tell whether nothing changes the forward pass that a manifest cannot say."""
        num_layers = 0 if self.decoder is None else self.decoder.num_layers
        roles = roles_of_draft(self.algorithm, num_layers)
        needed = (role.name.replace("{i}", "0") for role in roles if role.when == ALWAYS)
        is_whole = all(name in self.tensors for name in needed)
        is_known = all(find_role(role, roles) for role in self.tensors)
        return is_whole and is_known and not self.foreign_details

    def to_draft(self, *, source: str, revision: str | None) -> Draft | None:
        """Return the manifest section, or None while a required fact is open."""
        algorithm = served_algorithm(self.algorithm)
        if (
            algorithm is None
            or not self._is_described_by_manifest
            or self.config_digest is None
            or self.dtype is None
            or self.decoder is None
            or self.target_hidden_size is None
            or (self.aux_layer_ids is None and algorithm not in LAST_STATE_DRAFTS)
        ):
            return None
        return Draft(
            format=self.format,
            algorithm=algorithm,
            source=source,
            revision=revision,
            architecture=self.architecture,
            config_digest=self.config_digest,
            dtype=self.dtype,
            decoder=self.decoder,
            target_hidden_size=self.target_hidden_size,
            aux_layer_ids=self.aux_layer_ids,
            aux_numbering=self.aux_numbering,
            has_fc_bias=self.has_fc_bias,
            has_norm_before_residual=self.has_norm_before_residual,
            has_norm_before_fc=self.has_norm_before_fc,
            has_fc_norm=self.has_fc_norm,
            has_norm_output=self.has_norm_output,
            mask_token_id=self.mask_token_id,
            markov=self.markov,
            has_confidence_head=self.has_confidence_head,
            is_confidence_with_markov=self.is_confidence_with_markov,
            tensors=dict(self.tensors),
            files=self.files,
            block=block_facts(self.details) if self.is_block else None,
        )


def served_algorithm(algorithm: Algorithm) -> DraftAlgorithm | None:
    """Return the algorithm when a manifest can hold it, None for one that is not served."""
    served: tuple[DraftAlgorithm, ...] = get_args(DraftAlgorithm)
    return next((name for name in served if name == algorithm), None)


def chain_geometry(num_speculative_tokens: int) -> Geometry:
    """Return the widths of a chain (EAGLE-3, MTP): one slot in each draft forward."""
    return Geometry(
        num_speculative_tokens=num_speculative_tokens,
        draft_width=1,
        verify_width=num_speculative_tokens + 1,
        sample_from_anchor=None,
        draft_block_size=None,
    )


def parallel_geometry(num_speculative_tokens: int) -> Geometry:
    """Return the widths of a draft whose one forward has a slot for each token (P-EAGLE)."""
    return Geometry(
        num_speculative_tokens=num_speculative_tokens,
        draft_width=num_speculative_tokens,
        verify_width=num_speculative_tokens + 1,
        sample_from_anchor=None,
        draft_block_size=None,
    )


def block_geometry(
    *, draft_block_size: int, sample_from_anchor: bool, num_speculative_tokens: int | None = None
) -> Geometry:
    """Return the widths of a block draft (DSpark).

    Args:
        draft_block_size: slots of the trained block.
        sample_from_anchor: slot 0 is a prediction (gamma = block) or conditioning only (block - 1).
        num_speculative_tokens: fewer than the block offers; None for all of them. The draft forward
            then has as many slots as those tokens need.
    """
    available = draft_block_size if sample_from_anchor else draft_block_size - 1
    gamma = available if num_speculative_tokens is None else min(num_speculative_tokens, available)
    return Geometry(
        num_speculative_tokens=gamma,
        draft_width=gamma if sample_from_anchor else gamma + 1,
        verify_width=gamma + 1,
        sample_from_anchor=sample_from_anchor,
        draft_block_size=draft_block_size,
    )
