"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up in one weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels import Stream, interleave, linear, residual_linear, scaled_linear, silu_and_mul
from runtime.models.layers.roles import TensorSource
from specctl.contract.manifest import Decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MLP:
    """Weights of a gated MLP; D hidden size, I intermediate size.

    Args:
        gate_up_weight: [2 I, D], gate and up rows alternate (`interleave`).
        gate_up_bias: [2 I] in the same order, or None.
        down_weight: [D, I].
        down_bias: [D] or None.
    """

    gate_up_weight: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_weight: torch.Tensor
    down_bias: torch.Tensor | None

    @classmethod
    def build(cls, decoder: Decoder, take: TensorSource) -> MLP:
        """Take the tensors of one layer and fuse gate and up."""
        has_bias = decoder.has_mlp_bias
        return cls(
            gate_up_weight=interleave(take("gate_proj.weight"), take("up_proj.weight")),
            gate_up_bias=(
                interleave(take("gate_proj.bias"), take("up_proj.bias")) if has_bias else None
            ),
            down_weight=take("down_proj.weight"),
            down_bias=take("down_proj.bias") if has_bias else None,
        )

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return [N, D]."""
        pairs = linear(x_ND, self.gate_up_weight, self.gate_up_bias)
        gate_up = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        return linear(silu_and_mul(gate_up), self.down_weight, self.down_bias)

    def advance(self, stream: Stream, *, eps: float, next_norm_D: torch.Tensor) -> Stream:
        """Add the MLP of the stream's rows to the stream.

        Args:
            stream: rows at the norm before this MLP.
            eps: of that norm.
            next_norm_D: [D], weight of the norm after it.
        """
        gated = scaled_linear(
            stream, self.gate_up_weight, self.gate_up_bias, eps=eps, is_gated=True
        )
        return residual_linear(
            gated,
            self.down_weight,
            self.down_bias,
            residual_MD=stream.residual_MD,
            norm_D=next_norm_D,
        )
