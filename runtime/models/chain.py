"""What a draft of one token a step is to its proposer: EAGLE-3, EAGLE-1 and MTP alike.

Legend: N rows, M rows picked by the caller, A width of what the target hands over, H draft hidden,
R draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import HeadRows, RowNorm, Stream
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from specctl.contract.manifest import Draft


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftHidden:
    """The two readings of a draft forward's last state.

    Args:
        feedback_NH: what the next row of a chain takes as its state.
        head_input_NH: what `logits` and `propose_ids` read.
        stream: `head_input_NH` at `head_norm`, as the last layer wrote it; None: it came alone.
    """

    feedback_NH: torch.Tensor
    head_input_NH: torch.Tensor
    stream: Stream | None = None

    @property
    def head_rows(self) -> HeadRows:
        """What the head reads: the same logits either way, and one launch less from a stream."""
        return self.head_input_NH if self.stream is None else self.stream


class ChainDraft(Protocol):
    """A draft whose row (token at p + 1, state at p) gives the token at p + 2 and the next state.

    A draft whose facts name no `aux_layer_ids` reads the target's final-normed state.
    """

    @property
    def facts(self) -> Draft:
        """Manifest section that it was built from."""

    @property
    def embedding_VH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Input embedding over target ids."""

    @property
    def head_RH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Output head, one row per draft id."""

    @property
    def has_one_reading(self) -> bool:
        """Whether both readings of a last state are the same tensor."""

    @property
    def head_norm(self) -> RowNorm | None:
        """What `logits` and `propose_ids` do to their rows before the product."""

    @property
    def draft_to_target_R(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Absolute target id of each draft id, int64."""

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""

    @property
    def max_positions(self) -> int:
        """Context that the draft was made for."""

    def fuse(self, states_NA: torch.Tensor) -> torch.Tensor:
        """Return the draft's states [N, H] of what the target hands over."""

    def forward(
        self, batch: PreparedBatch, hidden_NH: torch.Tensor, kv: Sequence[KVLayer]
    ) -> DraftHidden:
        """Run the draft on rows whose ids are the token after the one that the state is of."""

    def logits(self, head_input_MH: HeadRows) -> torch.Tensor:
        """Return fp32 logits [M, R] over draft ids."""

    def propose_ids(
        self, head_input_MH: HeadRows, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int64 target ids [M]: the best draft id of each row, mapped.

        `copy_M`, with any stride, takes them, too.
        """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainModel:
    """What every such draft has around its layers.

    Args:
        facts: manifest section that it was built from.
        embedding: over target ids: its own or the target's.
        head: over draft ids: its own or (rows of) the target's.
        draft_to_target_R: int64, absolute target id of each draft id.
        cos_sin_TP: fp32 rotary table of the draft's own numbers.
    """

    facts: Draft
    embedding: VocabEmbedding
    head: VocabHead
    draft_to_target_R: torch.Tensor
    cos_sin_TP: torch.Tensor

    @property
    def embedding_VH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the input embedding that this rank holds."""
        return self.embedding.weight_RD

    @property
    def head_RH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the head that this rank holds, one per draft id."""
        return self.head.reachable_rows

    @property
    def head_norm(self) -> RowNorm | None:
        """What the head does to its input; None: it is normed already, or never."""
        return None

    @property
    def max_positions(self) -> int:
        """Context that the draft was made for; rows beyond it compute but are not meant."""
        return self.facts.decoder.max_position_embeddings

    def logits(self, head_input_MH: HeadRows) -> torch.Tensor:
        """Return fp32 logits [M, R] over draft ids."""
        return self.head.logits(head_input_MH, self.head_norm)

    def propose_ids(
        self, head_input_MH: HeadRows, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int64 target ids [M]: the best draft id of each row, mapped; `copy_M`, too."""
        return self.head.argmax(
            head_input_MH, self.head_norm, names_V=self.draft_to_target_R, copy_N=copy_M
        )
