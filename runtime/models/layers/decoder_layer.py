"""The pre-norm decoder layer.

`advance` takes the residual stream from one norm to the next (`runtime.kernels.stream`): the norms
live inside the products around them. `forward` is for layers whose input is no plain stream: it
hands over (delta, residual) instead of their sum, and the next norm adds and normalizes in one
kernel. The two round at different places, so a model uses one of them throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import Stream, add_rms_norm, rms_norm
from runtime.kv import KVLayer
from runtime.models.layers.attention import Attention
from runtime.models.layers.mlp import MLP
from runtime.models.layers.roles import TensorSource
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Decoder


def enter_norm(
    delta_ND: torch.Tensor | None, residual_ND: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm of the stream, the stream), where the stream is residual + delta.

    Args:
        delta_ND: output of the layer before; None when `residual_ND` already is the stream.
        residual_ND: the stream before that output.
        weight_D: norm weight.
        eps: of the norm.
    """
    if delta_ND is None:
        return rms_norm(residual_ND, weight_D, eps), residual_ND
    return add_rms_norm(delta_ND, residual_ND, weight_D, eps)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderLayer:
    """One layer: input norm, attention, post-attention norm, MLP; norms are [D]."""

    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: MLP
    rms_norm_eps: float

    @classmethod
    def build(
        cls, decoder: Decoder, take: TensorSource, *, layer_index: int, ranks: Ranks = ONE_RANK
    ) -> DecoderLayer:
        """Take the tensors of layer `layer_index`; `take` knows roles without the layer prefix.

        Args:
            decoder: facts of the whole stack.
            take: role -> this rank's shard.
            layer_index: which layer of the stack.
            ranks: who holds the other shards.
        """
        return cls(
            input_norm=take("input_norm"),
            attention=Attention.build(decoder, take, layer_index=layer_index, ranks=ranks),
            post_attention_norm=take("post_attention_norm"),
            mlp=MLP.build(decoder, take, ranks=ranks),
            rms_norm_eps=decoder.rms_norm_eps,
        )

    def forward(
        self,
        normed_ND: torch.Tensor,
        residual_ND: torch.Tensor,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run attention and MLP on rows that `input_norm` already normed.

        Args:
            normed_ND: `enter_norm` of the stream with this layer's `input_norm`.
            residual_ND: the stream itself.
            batch: positions, slots and block tables.
            cache: this layer's cache.
            cos_sin_TP: fp32 rotary table.

        Returns:
            (delta, residual), each [N, D]; their sum is the stream after this layer.
        """
        attended = self.attention.forward(normed_ND, batch, cache, cos_sin_TP)
        normed, residual = add_rms_norm(
            attended, residual_ND, self.post_attention_norm, self.rms_norm_eps
        )
        return self.mlp.forward(normed), residual

    def advance(
        self,
        stream: Stream,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        next_norm_D: torch.Tensor,
    ) -> Stream:
        """Run attention and MLP on the stream.

        Args:
            stream: rows at this layer's `input_norm`.
            batch: positions, slots and block tables.
            cache: this layer's cache.
            cos_sin_TP: fp32 rotary table.
            next_norm_D: [D], weight of the norm after this layer: the next layer's, or the last.
        """
        attended = self.attention.advance(
            stream,
            batch,
            cache,
            cos_sin_TP,
            input_norm_eps=self.rms_norm_eps,
            next_norm_D=self.post_attention_norm,
        )
        return self.mlp.advance(attended, eps=self.rms_norm_eps, next_norm_D=next_norm_D)
