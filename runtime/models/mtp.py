"""Prediction layers (MTP): each joins a token's embedding with a state of one position before it.

Row i of a request holds token x[i+1] and the target's final-normed state at position i; its logits
propose x[i+2]. One layer is run again for later tokens, on its own output.
Legend: N rows, M rows picked by the caller, H hidden size of target and layer, R draft vocabulary,
T positions, V target vocabulary.
*Source:* DeepSeek-V3 report, section 2.2, and its layer 61; Speculators 0.9 `MTPDraftModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import RowHalf, RowNorm, enter_stream, joined_linear, rms_norm
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.chain import ChainModel, DraftHidden
from runtime.models.layers import (
    DecoderLayer,
    TensorSource,
    decoder_rope_table,
    layer_source,
)
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Draft, PredictionLayers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictionLayer:
    """A decoder layer, what joins its two inputs, and the norm before the head.

    Args:
        embedding_norm: [H], of the token's embedding.
        hidden_norm: [H], of the state.
        fc_weight: [H, 2 H].
        layer: the decoder layer.
        norm_H: norm before the head.
        is_hidden_first: the first half of `fc_weight` reads the state.
        is_feedback_normed: the next step reads the normed output.
    """

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    fc_weight: torch.Tensor
    layer: DecoderLayer
    norm_H: torch.Tensor
    is_hidden_first: bool
    is_feedback_normed: bool

    @classmethod
    def build(
        cls,
        facts: Draft,
        take: TensorSource,
        around: TensorSource,
        *,
        layer_index: int,
        ranks: Ranks = ONE_RANK,
    ) -> PredictionLayer:
        """Take the tensors of one layer.

        Args:
            facts: manifest section.
            take: knows the roles of the decoder layer without their prefix.
            around: knows `fc.weight` and the three norms around it.
            layer_index: of the layer in `facts.decoder`.
            ranks: who holds the other shards of the decoder layer.
        """
        rules = facts.prediction or PredictionLayers()
        return cls(
            embedding_norm=around("embedding_norm"),
            hidden_norm=around("hidden_norm"),
            fc_weight=around("fc.weight"),
            layer=DecoderLayer.build(facts.decoder, take, layer_index=layer_index, ranks=ranks),
            norm_H=around("norm"),
            is_hidden_first=rules.concat_order == "hidden, embedding",
            is_feedback_normed=rules.recycled_hidden == "normed",
        )

    @property
    def token_norm(self) -> RowNorm:
        """What the embedding half goes through."""
        return RowNorm(weight_D=self.embedding_norm, eps=self.layer.rms_norm_eps)

    def forward(
        self,
        token: RowHalf,
        hidden_NH: torch.Tensor,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
    ) -> DraftHidden:
        """Return both readings of the layer's output for the rows of `batch`.

        The embedding `token` brings `token_norm`.
        """
        eps = self.layer.rms_norm_eps
        state = RowHalf(rows_XD=hidden_NH, norm=RowNorm(weight_D=self.hidden_norm, eps=eps))
        halves = (state, token) if self.is_hidden_first else (token, state)
        joined = joined_linear(*halves, self.fc_weight)
        stream = enter_stream(joined, self.layer.input_norm)
        stream = self.layer.advance(stream, batch, cache, cos_sin_TP, next_norm_D=self.norm_H)
        raw = stream.residual_MD
        normed = rms_norm(raw, self.norm_H, eps)
        return DraftHidden(
            feedback_NH=normed if self.is_feedback_normed else raw, head_input_NH=normed
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MtpModel(ChainModel):
    """Weights of prediction layers and their forward; each layer norms its own output.

    Args:
        layers: one, or one per drafted token.
    """

    layers: tuple[PredictionLayer, ...]

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
    ) -> MtpModel:
        """Build the model from tensors with the roles and shapes of `layers.mtp_shapes`.

        Args:
            facts: manifest section.
            take: role -> tensor.
            embedding: resolved input embedding over target ids.
            head: resolved head over draft ids.
            draft_to_target_R: int64 absolute target ids in draft-id order.
            num_positions: rows of the rotary table: every position that the target can reach.
            ranks: who holds the other shards of the layers.
        """
        decoder = facts.decoder
        is_alone = decoder.num_layers == 1
        sources = [layer_source(take, index) for index in range(decoder.num_layers)]
        return cls(
            facts=facts,
            embedding=embedding,
            layers=tuple(
                PredictionLayer.build(
                    facts, source, take if is_alone else source, layer_index=index, ranks=ranks
                )
                for index, source in enumerate(sources)
            ),
            head=head,
            draft_to_target_R=draft_to_target_R,
            cos_sin_TP=decoder_rope_table(
                decoder, num_positions=num_positions, device=embedding.weight_RD.device
            ),
        )

    @property
    def has_one_reading(self) -> bool:
        """Whether what is fed back is normed for the head, too."""
        return all(layer.is_feedback_normed for layer in self.layers)

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        return tuple(part.layer.attention.kv_spec for part in self.layers)

    def fuse(self, states_NA: torch.Tensor) -> torch.Tensor:
        """Return the target's final-normed states [N, H] as they are: each layer norms its own."""
        return states_NA

    def forward(
        self, batch: PreparedBatch, hidden_NH: torch.Tensor, kv: Sequence[KVLayer]
    ) -> DraftHidden:
        """Run the only layer, or the first, on the rows of `batch`; see `forward_layer`."""
        return self.forward_layer(0, batch, hidden_NH, kv)

    def forward_layer(
        self, index: int, batch: PreparedBatch, hidden_NH: torch.Tensor, kv: Sequence[KVLayer]
    ) -> DraftHidden:
        """Run one layer on the rows of `batch`, writing its keys and values.

        Args:
            index: of the layer.
            batch: rows whose ids are target ids: the token after the last that the state has seen.
            hidden_NH: the target's final-normed states, or `feedback_NH` of the step before.
            kv: cache layers of all layers.
        """
        token = self.embedding.half(batch.ids_target_N, self.layers[index].token_norm)
        return self.layers[index].forward(token, hidden_NH, batch, kv[index], self.cos_sin_TP)
