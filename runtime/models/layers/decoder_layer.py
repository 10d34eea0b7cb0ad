"""The pre-norm decoder layer.

`advance` takes the residual stream from one norm to the next (`runtime.kernels.stream`): the norms
live inside the products around them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import Stream
from runtime.kv import KVLayer
from runtime.models.layers.attention import Attention
from runtime.models.layers.mlp import MLP
from runtime.models.layers.roles import TensorSource
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Decoder


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

    def advance(
        self,
        stream: Stream,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        next_norm_D: torch.Tensor,
        out_ND: torch.Tensor | None = None,
    ) -> Stream:
        """Run attention and MLP on the stream.

        Args:
            stream: rows at this layer's `input_norm`.
            batch: positions, slots and block tables.
            cache: this layer's cache.
            cos_sin_TP: fp32 rotary table.
            next_norm_D: [D], weight of the norm after this layer: the next layer's, or the last.
            out_ND: takes the stream after this layer, of one rank; None: it lies anywhere.
        """
        attended = self.attention.advance(
            stream,
            batch,
            cache,
            cos_sin_TP,
            input_norm_eps=self.rms_norm_eps,
            next_norm_D=self.post_attention_norm,
        )
        return self.mlp.advance(
            attended, eps=self.rms_norm_eps, next_norm_D=next_norm_D, out_ND=out_ND
        )
