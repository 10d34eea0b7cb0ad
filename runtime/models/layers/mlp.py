"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up in one weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels import Stream, interleave, linear, scaled_linear, silu_and_mul
from runtime.models.layers.ranked import add_to_stream, rank_linear
from runtime.models.layers.roles import TensorSource
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.manifest import Decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MLP:
    """Weights of a gated MLP; D hidden size, I intermediate size of this rank.

    Args:
        gate_up_weight: [2 I, D], gate and up rows alternate (`interleave`).
        gate_up_bias: [2 I] in the same order, or None.
        down_weight: [D, I].
        down_bias: [D] or None.
        ranks: who holds the other intermediate features.
    """

    gate_up_weight: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_weight: torch.Tensor
    down_bias: torch.Tensor | None
    ranks: Ranks = ONE_RANK

    @classmethod
    def build(cls, decoder: Decoder, take: TensorSource, *, ranks: Ranks = ONE_RANK) -> MLP:
        """Take the tensors of one layer and fuse gate and up."""
        has_bias = decoder.has_mlp_bias
        return cls(
            gate_up_weight=interleave(take("gate_proj.weight"), take("up_proj.weight")),
            gate_up_bias=(
                interleave(take("gate_proj.bias"), take("up_proj.bias")) if has_bias else None
            ),
            down_weight=take("down_proj.weight"),
            down_bias=take("down_proj.bias") if has_bias else None,
            ranks=ranks,
        )

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return [N, D]."""
        pairs = linear(x_ND, self.gate_up_weight, self.gate_up_bias)
        gate_up = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        return rank_linear(self.ranks, silu_and_mul(gate_up), self.down_weight, self.down_bias)

    def advance(
        self,
        stream: Stream,
        *,
        eps: float,
        next_norm_D: torch.Tensor,
        out_ND: torch.Tensor | None = None,
    ) -> Stream:
        """Add the MLP of the stream's rows to the stream.

        Args:
            stream: rows at the norm before this MLP.
            eps: of that norm.
            next_norm_D: [D], weight of the norm after it.
            out_ND: as of `add_to_stream`.
        """
        gated = scaled_linear(
            stream, self.gate_up_weight, self.gate_up_bias, eps=eps, is_gated=True
        )
        return add_to_stream(
            self.ranks,
            gated,
            self.down_weight,
            self.down_bias,
            residual_MD=stream.residual_MD,
            norm_D=next_norm_D,
            out_MD=out_ND,
        )
