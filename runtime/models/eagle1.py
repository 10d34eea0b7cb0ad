"""The EAGLE-1 draft (EAGLE-2 and HASS files too): decoder layers over fc(embedding, state).

Row i of a request holds token x[i+1] and the target's final-normed state at position i. The layers'
raw output stands for the state at i + 1: the target's head makes it propose x[i+2], and the next
row of a chain takes it in place of the target's state. The first layer has no input norm.
Drafts trained with `layernorms` (Speculators) norm the embedding, the first layer's input, and the
head's input; what is fed back stays raw.
Legend: N rows, M rows picked by the caller, H hidden size of draft and target, R draft vocabulary,
T positions, V target vocabulary.
*Source:* Li et al., "EAGLE" (arXiv 2401.15077); SafeAILab `cnets1.py`; Speculators 0.6 `eagle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import RowHalf, RowNorm, Stream, joined_linear, linear, rms_norm
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.chain import ChainModel, DraftHidden
from runtime.models.layers import (
    MLP,
    Attention,
    DecoderLayer,
    TensorSource,
    decoder_rope_table,
    layer_source,
)
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Draft


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedLayer:
    """The first layer: fc joins its inputs, and attention reads them with or without a norm.

    Args:
        fc_weight: [H, 2 H], the embedding's half first.
        fc_bias: [H] or None.
        embedding_norm: [H] or None.
        input_norm: [H] or None.
    """

    fc_weight: torch.Tensor
    fc_bias: torch.Tensor | None
    embedding_norm: torch.Tensor | None
    input_norm: torch.Tensor | None
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: MLP
    rms_norm_eps: float

    @classmethod
    def build(cls, facts: Draft, take: TensorSource, *, ranks: Ranks = ONE_RANK) -> FusedLayer:
        """Take fc, whole on every rank, and this rank's shards of layer 0."""
        decoder, layer = facts.decoder, layer_source(take, 0)
        return cls(
            fc_weight=take("fc.weight"),
            fc_bias=take("fc.bias") if facts.has_fc_bias else None,
            embedding_norm=take("embedding_norm") if "embedding_norm" in facts.tensors else None,
            input_norm=layer("input_norm") if "layers.0.input_norm" in facts.tensors else None,
            attention=Attention.build(decoder, layer, layer_index=0, ranks=ranks),
            post_attention_norm=layer("post_attention_norm"),
            mlp=MLP.build(decoder, layer, ranks=ranks),
            rms_norm_eps=decoder.rms_norm_eps,
        )

    @property
    def token_norm(self) -> RowNorm | None:
        """What the embedding half goes through."""
        if self.embedding_norm is None:
            return None
        return RowNorm(weight_D=self.embedding_norm, eps=self.rms_norm_eps)

    def forward(
        self,
        token: RowHalf,
        hidden_NH: torch.Tensor,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        next_norm_H: torch.Tensor,
    ) -> Stream:
        """Return the stream after this layer, at the norm whose weight is `next_norm_H`.

        The embedding `token` brings `token_norm`.
        """
        eps = self.rms_norm_eps
        state = RowHalf(rows_XD=hidden_NH)
        joined = joined_linear(token, state, self.fc_weight, self.fc_bias)
        read = joined if self.input_norm is None else rms_norm(joined, self.input_norm, eps)
        attended = self.attention.join(
            linear(read, self.attention.qkv_weight, self.attention.qkv_bias),
            joined,
            batch,
            cache,
            cos_sin_TP,
            next_norm_D=self.post_attention_norm,
        )
        return self.mlp.advance(attended, eps=eps, next_norm_D=next_norm_H)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Eagle1Model(ChainModel):
    """Weights of an EAGLE-1 draft and its forward.

    Args:
        first_layer: layer 0 with fc.
        layers: layers 1 and up.
        norm_H: norm before the head; None when the head reads the raw output.
    """

    first_layer: FusedLayer
    layers: tuple[DecoderLayer, ...]
    norm_H: torch.Tensor | None

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
    ) -> Eagle1Model:
        """Build the model from tensors with the roles and shapes of `layers.eagle1_shapes`.

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
        return cls(
            facts=facts,
            embedding=embedding,
            first_layer=FusedLayer.build(facts, take, ranks=ranks),
            layers=tuple(
                DecoderLayer.build(
                    decoder, layer_source(take, index), layer_index=index, ranks=ranks
                )
                for index in range(1, decoder.num_layers)
            ),
            norm_H=take("norm") if "norm" in facts.tensors else None,
            head=head,
            draft_to_target_R=draft_to_target_R,
            cos_sin_TP=decoder_rope_table(
                decoder, num_positions=num_positions, device=embedding.weight_RD.device
            ),
        )

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        attentions = (self.first_layer.attention, *(la.attention for la in self.layers))
        return tuple(attention.kv_spec for attention in attentions)

    def fuse(self, states_NA: torch.Tensor) -> torch.Tensor:
        """Return the target's final-normed states [N, H] as they are: fc reads them directly."""
        return states_NA

    def forward(
        self, batch: PreparedBatch, hidden_NH: torch.Tensor, kv: Sequence[KVLayer]
    ) -> DraftHidden:
        """Run the draft's layers on the rows of `batch`, writing their keys and values.

        Args:
            batch: rows whose ids are target ids: the token after the one that the state is of.
            hidden_NH: the target's final-normed states, or `feedback_NH` of the row before.
            kv: this draft's cache layers, one per layer.
        """
        # Without a norm before the head nothing reads the weighted half of the last stream.
        last = self.first_layer.post_attention_norm if self.norm_H is None else self.norm_H
        norms = (*(layer.input_norm for layer in self.layers), last)
        stream = self.first_layer.forward(
            self.embedding.half(batch.ids_target_N, self.first_layer.token_norm),
            hidden_NH,
            batch,
            kv[0],
            self.cos_sin_TP,
            next_norm_H=norms[0],
        )
        for layer, cache, next_norm in zip(self.layers, kv[1:], norms[1:], strict=True):
            stream = layer.advance(stream, batch, cache, self.cos_sin_TP, next_norm_D=next_norm)
        raw = stream.residual_MD
        is_normed = self.norm_H is not None
        return DraftHidden(feedback_NH=raw, head_input_NH=raw, stream=stream if is_normed else None)

    @property
    def has_one_reading(self) -> bool:
        """Always: the head norms what is fed back."""
        return True

    @property
    def head_norm(self) -> RowNorm | None:
        """What the head does to its input."""
        if self.norm_H is None:
            return None
        return RowNorm(weight_D=self.norm_H, eps=self.facts.decoder.rms_norm_eps)
