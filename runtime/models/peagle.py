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
from runtime.kv import KVLayer
from runtime.models.chain import DraftHidden
from runtime.models.eagle3 import Eagle3Model
from runtime.models.layers import TensorSource
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Draft


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PEagleModel(Eagle3Model):
    """Weights of a P-EAGLE draft and its forwards.

    Args:
        mask_id_target: token that a row without a known token embeds.
        mask_state_H: its state: `fuse` of `mask_hidden`, the same for every row.
    """

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
            facts=facts,
            embedding=embedding,
            fusion=eagle3.fusion,
            first_layer=eagle3.first_layer,
            layers=eagle3.layers,
            norm_H=eagle3.norm_H,
            head=head,
            draft_to_target_R=draft_to_target_R,
            cos_sin_TP=eagle3.cos_sin_TP,
            mask_id_target=facts.mask_token_id,
            mask_state_H=eagle3.fuse(take("mask_hidden").reshape(1, -1))[0],
        )

    def forward_masked(self, batch: PreparedBatch, kv: Sequence[KVLayer]) -> DraftHidden:
        """Run the draft on rows that stand for unknown tokens; their ids are `mask_id_target`."""
        state_NH = self.mask_state_H.expand(batch.num_rows, -1).contiguous()
        return self.forward(batch, state_NH, kv)
