"""Grouped-query attention over the paged cache, with optional biases, q/k norm and a window."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import (
    HeadNorms,
    Stream,
    attend_new_rows,
    linear,
    scaled_linear,
)
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.layers.ranked import add_to_stream, rank_linear
from runtime.models.layers.roles import TensorSource
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attention:
    """Weights and constants of one attention; N rows, H heads, G kv heads, P head dim, D hidden.

    Heads are those of this rank; every rank has as many.

    Args:
        qkv_weight: [(H + 2 G) P, K], rows of q, then k, then v; K is D (2 D in EAGLE-3's first).
        qkv_bias: [(H + 2 G) P] or None.
        o_weight: [D, H P].
        o_bias: [D] or None.
        q_norm: [P] or None; with `k_norm`, applied to each head before the rotation.
        k_norm: [P] or None.
        rms_norm_eps: of the q/k norms.
        window: newest positions that a row sees, its own included; None sees all.
        ranks: who holds the other heads.
    """

    qkv_weight: torch.Tensor
    qkv_bias: torch.Tensor | None
    o_weight: torch.Tensor
    o_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    window: int | None
    ranks: Ranks = ONE_RANK

    @classmethod
    def build(
        cls, decoder: Decoder, take: TensorSource, *, layer_index: int, ranks: Ranks = ONE_RANK
    ) -> Attention:
        """Take the tensors of one layer and fuse q, k and v.

        Args:
            decoder: facts of the whole stack.
            take: role -> this rank's shard.
            layer_index: which layer of the stack.
            ranks: who holds the other heads.
        """
        names = ("q_proj", "k_proj", "v_proj")
        is_sliding = decoder.layer_types[layer_index] == "sliding_attention"
        has_norm = decoder.has_qk_norm
        return cls(
            qkv_weight=torch.cat([take(f"{name}.weight") for name in names]),
            qkv_bias=(
                torch.cat([take(f"{name}.bias") for name in names])
                if decoder.has_qkv_bias
                else None
            ),
            o_weight=take("o_proj.weight"),
            o_bias=take("o_proj.bias") if decoder.has_o_bias else None,
            q_norm=take("q_norm") if has_norm else None,
            k_norm=take("k_norm") if has_norm else None,
            num_heads=decoder.num_attention_heads // ranks.size,
            num_kv_heads=decoder.num_kv_heads // ranks.size,
            head_dim=decoder.head_dim,
            rms_norm_eps=decoder.rms_norm_eps,
            window=decoder.sliding_window if is_sliding else None,
            ranks=ranks,
        )

    @property
    def kv_spec(self) -> KVLayerSpec:
        """What this layer needs from the cache."""
        return KVLayerSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def forward(
        self, x_NK: torch.Tensor, batch: PreparedBatch, cache: KVLayer, cos_sin_TP: torch.Tensor
    ) -> torch.Tensor:
        """Write the rows' keys and values to `cache`, attend, and project.

        Args:
            x_NK: normed inputs, one row per row of `batch`.
            batch: positions, slots and block tables.
            cache: this layer's cache; rows at `batch.slots_N` are overwritten.
            cos_sin_TP: fp32 rotary table.

        Returns:
            [N, D] in the dtype of `x_NK`.
        """
        qkv = linear(x_NK, self.qkv_weight, self.qkv_bias)
        mixed = self.mix(qkv, batch, cache, cos_sin_TP)
        return rank_linear(self.ranks, mixed, self.o_weight, self.o_bias)

    def advance(
        self,
        stream: Stream,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        input_norm_eps: float,
        next_norm_D: torch.Tensor,
    ) -> Stream:
        """Attend from the stream's rows and add the result to the stream.

        Args:
            stream: rows at the norm before this attention.
            batch: as in `forward`.
            cache: as in `forward`.
            cos_sin_TP: as in `forward`.
            input_norm_eps: of the norm before this attention.
            next_norm_D: [D], weight of the norm after it.
        """
        qkv = scaled_linear(stream, self.qkv_weight, self.qkv_bias, eps=input_norm_eps)
        return self.join(qkv, stream.residual_MD, batch, cache, cos_sin_TP, next_norm_D=next_norm_D)

    def join(
        self,
        qkv_NQ: torch.Tensor,
        residual_ND: torch.Tensor,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        next_norm_D: torch.Tensor,
    ) -> Stream:
        """Attend with projected rows [N, (H + 2 G) P] and add the result to `residual_ND`."""
        return add_to_stream(
            self.ranks,
            self.mix(qkv_NQ, batch, cache, cos_sin_TP),
            self.o_weight,
            self.o_bias,
            residual_MD=residual_ND,
            norm_D=next_norm_D,
        )

    def mix(
        self,
        qkv_NQ: torch.Tensor,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        segment: int | None = None,
    ) -> torch.Tensor:
        """Norm, rotate, write to the cache and attend; return [N, H P].

        Given a `segment` it leaves the exactness contract (`attend_new_rows`).
        """
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = torch.split(
            qkv_NQ.view(qkv_NQ.shape[0], sum(heads), self.head_dim), list(heads), dim=1
        )
        mixed = attend_new_rows(
            q,
            k,
            v,
            cache,
            batch,
            cos_sin_TP,
            scale=self.head_dim**-0.5,
            norms=self._norms,
            window=self.window,
            segment=segment,
        )
        return mixed.flatten(1)

    @property
    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(q_P=self.q_norm, k_P=self.k_norm, eps=self.rms_norm_eps)
