"""The EAGLE-3 draft: one layer over (token embedding, target state), then ordinary layers.

Row i of a request holds token x[i+1] and the state g[i] that `fuse` makes of the target's captured
states at position i; its logits propose x[i+2]. A chain feeds the `feedback` of the row before in
place of g.
Legend: N rows, M rows picked by the caller, A captured states, H draft hidden, R draft vocab,
T positions, V target vocab.
*Source:* SafeAILab EAGLE-3 and Speculators eagle3 (`norm_before_residual`, `norm_before_fc`,
`fc_norm`, `norm_output`); arXiv 2503.01840. The head always reads norm(h); `norm_output` decides
whether norm(h) or h is fed back, and adds no tensor.
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
from runtime.models.support import decoder_problems
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import Draft


def eagle3_problems(draft: Draft) -> list[Diagnostic]:
    """Return every reason in the facts why this draft cannot run (codes: `decoder_problems`)."""
    return decoder_problems(draft.decoder, where="manifest#/draft/decoder")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fuse:
    """Makes one draft state of the captured target states.

    Args:
        weight: [H, A * H_t], columns of the lowest captured layer first.
        bias: [H] or None.
        input_norm: [A * H_t] over all states together (`norm_before_fc`), or None.
        state_norms: one [H_t] per state (`fc_norm`), or none.
        rms_norm_eps: of these norms.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    input_norm: torch.Tensor | None
    state_norms: tuple[torch.Tensor, ...]
    rms_norm_eps: float

    @classmethod
    def build(cls, facts: Draft, take: TensorSource) -> Fuse:
        """Take the tensors of fc and its norms."""
        num_states = len(facts.aux_layer_ids or ())
        return cls(
            weight=take("fc.weight"),
            bias=take("fc.bias") if facts.has_fc_bias else None,
            input_norm=take("input_norm") if facts.has_norm_before_fc else None,
            state_norms=(
                tuple(take(f"fc_norm.{i}") for i in range(num_states)) if facts.has_fc_norm else ()
            ),
            rms_norm_eps=facts.decoder.rms_norm_eps,
        )

    def forward(self, aux_NA: torch.Tensor) -> torch.Tensor:
        """Return [N, H]."""
        if self.input_norm is not None:
            aux_NA = rms_norm(aux_NA, self.input_norm, self.rms_norm_eps)
        if self.state_norms:
            states = aux_NA.chunk(len(self.state_norms), dim=1)
            pairs = zip(states, self.state_norms, strict=True)
            aux_NA = torch.cat(
                [rms_norm(state, weight, self.rms_norm_eps) for state, weight in pairs], dim=1
            )
        return linear(aux_NA, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstLayer:
    """The layer that reads a token and a state: attention input is (embedding, state), 2 H wide.

    Args:
        input_norm: [H], of the embedding half.
        hidden_norm: [H], of the state half.
        has_norm_before_residual: the residual is the normed state instead of the state.
    """

    input_norm: torch.Tensor
    hidden_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: MLP
    has_norm_before_residual: bool
    rms_norm_eps: float

    @classmethod
    def build(cls, facts: Draft, take: TensorSource, *, ranks: Ranks = ONE_RANK) -> FirstLayer:
        """Take the tensors of layer 0; `take` knows roles without the layer prefix."""
        decoder = facts.decoder
        return cls(
            input_norm=take("input_norm"),
            hidden_norm=take("hidden_norm"),
            attention=Attention.build(decoder, take, layer_index=0, ranks=ranks),
            post_attention_norm=take("post_attention_norm"),
            mlp=MLP.build(decoder, take, ranks=ranks),
            has_norm_before_residual=facts.has_norm_before_residual,
            rms_norm_eps=decoder.rms_norm_eps,
        )

    @property
    def token_norm(self) -> RowNorm:
        """What the embedding half goes through."""
        return RowNorm(weight_D=self.input_norm, eps=self.rms_norm_eps)

    def forward(
        self,
        token: RowHalf,
        state_NH: torch.Tensor,
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
        state = RowHalf(rows_XD=state_NH, norm=RowNorm(weight_D=self.hidden_norm, eps=eps))
        residual_NH = state_NH
        if self.has_norm_before_residual:
            residual_NH = rms_norm(state_NH, self.hidden_norm, eps)
        attended = self.attention.join(
            joined_linear(token, state, self.attention.qkv_weight, self.attention.qkv_bias),
            residual_NH,
            batch,
            cache,
            cos_sin_TP,
            next_norm_D=self.post_attention_norm,
        )
        return self.mlp.advance(attended, eps=eps, next_norm_D=next_norm_H)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Eagle3Model(ChainModel):
    """Weights of an EAGLE-3 draft and its forward.

    Args:
        fusion: fc and its norms.
        first_layer: layer 0.
        layers: layers 1 and up.
        norm_H: norm before the head.
    """

    fusion: Fuse
    first_layer: FirstLayer
    layers: tuple[DecoderLayer, ...]
    norm_H: torch.Tensor

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
    ) -> Eagle3Model:
        """Build the model from tensors with the roles and shapes of `layers.eagle3_shapes`.

        Args:
            facts: manifest section.
            take: role -> tensor.
            embedding: resolved input embedding over target ids.
            head: resolved head over draft ids.
            draft_to_target_R: int64 absolute target ids in draft-id order.
            num_positions: rows of the rotary table: every position that the target can reach, so
                that a draft with a shorter context is limited by its proposer, not by an index.
            ranks: who holds the other shards of the layers.
        """
        decoder = facts.decoder
        return cls(
            facts=facts,
            embedding=embedding,
            fusion=Fuse.build(facts, take),
            first_layer=FirstLayer.build(facts, layer_source(take, 0), ranks=ranks),
            layers=tuple(
                DecoderLayer.build(
                    decoder, layer_source(take, index), layer_index=index, ranks=ranks
                )
                for index in range(1, decoder.num_layers)
            ),
            norm_H=take("norm"),
            head=head,
            draft_to_target_R=draft_to_target_R,
            cos_sin_TP=decoder_rope_table(
                decoder, num_positions=num_positions, device=embedding.weight_RD.device
            ),
        )

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        return tuple(
            attention.kv_spec
            for attention in (self.first_layer.attention, *(la.attention for la in self.layers))
        )

    def fuse(self, aux_NA: torch.Tensor) -> torch.Tensor:
        """Return draft states [N, H] of captured target states [N, A * H_t], lowest layer first."""
        return self.fusion.forward(aux_NA)

    def forward(
        self, batch: PreparedBatch, hidden_NH: torch.Tensor, kv: Sequence[KVLayer]
    ) -> DraftHidden:
        """Run the draft's layers on the rows of `batch`, writing their keys and values.

        Args:
            batch: rows whose ids are target ids: the token after the one that the state is of.
            hidden_NH: `fuse` of the target's states, or `feedback` of the row before.
            kv: this draft's cache layers, one per layer.
        """
        norms = (*(layer.input_norm for layer in self.layers), self.norm_H)
        token = self.embedding.half(batch.ids_target_N, self.first_layer.token_norm)
        stream = self.first_layer.forward(
            token, hidden_NH, batch, kv[0], self.cos_sin_TP, next_norm_H=norms[0]
        )
        for layer, cache, next_norm in zip(self.layers, kv[1:], norms[1:], strict=True):
            stream = layer.advance(stream, batch, cache, self.cos_sin_TP, next_norm_D=next_norm)
        raw = stream.residual_MD
        if not self.facts.has_norm_output:
            return DraftHidden(feedback_NH=raw, head_input_NH=raw, stream=stream)
        normed = rms_norm(raw, self.norm_H, self.facts.decoder.rms_norm_eps)
        return DraftHidden(feedback_NH=normed, head_input_NH=normed)

    @property
    def has_one_reading(self) -> bool:
        """Always: the head norms what is fed back, or both are normed."""
        return True

    @property
    def head_norm(self) -> RowNorm | None:
        """What the head does to its input; None where the fed back state is normed already."""
        if self.facts.has_norm_output:
            return None
        return RowNorm(weight_D=self.norm_H, eps=self.facts.decoder.rms_norm_eps)
