"""The P-EAGLE draft: an EAGLE-3 draft whose later rows need no token and no state.

A row that stands for a token nobody knows yet embeds the mask token and takes the state that `fuse`
makes of `mask_hidden`. Row d of a rollout stands d positions after the newest known entry and sees
all entries before it, so that one forward over the rows 1..gamma - 1 makes all drafts but the
first, which the newest entry itself proposes.
Legend: N rows, M rows picked by the caller, A captured states, H draft hidden, R draft vocabulary.
*Source:* Speculators 0.9 `PEagleDraftModel` and its attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import RowNorm
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.chain import DraftHidden
from runtime.models.eagle3 import Eagle3Model
from runtime.models.layers import TensorSource
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Draft


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PEagleModel:
    """Weights of a P-EAGLE draft and its forward.

    Args:
        eagle3: everything but the mask.
        mask_id_target: token that a row without a known token embeds.
        mask_state_H: its state: `fuse` of `mask_hidden`, the same for every row.
    """

    eagle3: Eagle3Model
    mask_id_target: int
    mask_state_H: torch.Tensor

    @classmethod
    def build(
        cls,
        facts: Draft,
        take: TensorSource,
        *,
        embedding: VocabEmbedding,
        head: VocabHead,
        draft_to_target_R: torch.Tensor,
        num_positions: int,
        ranks: Ranks = ONE_RANK,
    ) -> PEagleModel:
        """Build the model from tensors with the roles and shapes of `layers.peagle_shapes`.

        Args: as `Eagle3Model.build`.
        """
        assert facts.mask_token_id is not None, "a manifest of peagle names its mask token"
        eagle3 = Eagle3Model.build(
            facts,
            take,
            embedding=embedding,
            head=head,
            draft_to_target_R=draft_to_target_R,
            num_positions=num_positions,
            ranks=ranks,
        )
        return cls(
            eagle3=eagle3,
            mask_id_target=facts.mask_token_id,
            mask_state_H=eagle3.fuse(take("mask_hidden").reshape(1, -1))[0],
        )

    @property
    def facts(self) -> Draft:
        """Manifest section that it was built from."""
        return self.eagle3.facts

    @property
    def embedding(self) -> VocabEmbedding:
        """Input embedding over target ids."""
        return self.eagle3.embedding

    @property
    def head(self) -> VocabHead:
        """Output head over draft ids."""
        return self.eagle3.head

    @property
    def embedding_VH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the input embedding that this rank holds."""
        return self.eagle3.embedding_VH

    @property
    def draft_to_target_R(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Absolute target id of each draft id, int64."""
        return self.eagle3.draft_to_target_R

    @property
    def head_RH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the head that this rank holds, one per draft id."""
        return self.eagle3.head_RH

    @property
    def has_one_reading(self) -> bool:
        """As of `Eagle3Model`."""
        return self.eagle3.has_one_reading

    @property
    def head_norm(self) -> RowNorm | None:
        """What the head does to its input."""
        return self.eagle3.head_norm

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        return self.eagle3.kv_specs

    @property
    def max_positions(self) -> int:
        """Context that the draft was made for."""
        return self.eagle3.max_positions

    def fuse(self, states_NA: torch.Tensor) -> torch.Tensor:
        """Return draft states [N, H] of captured target states, lowest layer first."""
        return self.eagle3.fuse(states_NA)

    def forward(
        self, batch: PreparedBatch, hidden_NH: torch.Tensor, kv: Sequence[KVLayer]
    ) -> DraftHidden:
        """Run the draft on rows with known tokens and states; see `Eagle3Model.forward`."""
        return self.eagle3.forward(batch, hidden_NH, kv)

    def forward_masked(self, batch: PreparedBatch, kv: Sequence[KVLayer]) -> DraftHidden:
        """Run the draft on rows that stand for unknown tokens; their ids are `mask_id_target`."""
        state_NH = self.mask_state_H.expand(batch.num_rows, -1).contiguous()
        return self.eagle3.forward(batch, state_NH, kv)

    def logits(self, head_input_MH: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [M, R] over draft ids."""
        return self.eagle3.logits(head_input_MH)

    def propose_ids(self, head_input_MH: torch.Tensor) -> torch.Tensor:
        """Return int64 target ids [M]: the best draft id of each row, mapped."""
        return self.eagle3.propose_ids(head_input_MH)
