"""What DFlash2 adds to a block draft: local convolutions around sub-layers, a candidate selector.

Legend: N rows, M rows picked by the caller, H draft hidden, K taps, J channel groups, r rank, C
candidates, V target vocab (DFlash2 has no reduced one).
*Source:* z-lab/dflash 0.1.0; Speculators 0.9 dflash2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels import embed, linear
from runtime.models.layers import TensorSource
from specctl.contract.manifest import CandidateSelector, LocalConvolution


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Convolution:
    """Mixes each slot with those before it, at the input and at the output of a sub-layer.

    The kernel of a slot is a learnt one plus a part that the slot's state before the sub-layer
    gives, for both sides.

    Args:
        base_2KH: learnt kernels of input and output.
        projection: [2 K J, H], rows by side, tap and group.
        group_size: channels of a group, H / J.
    """

    base_2KH: torch.Tensor
    projection: torch.Tensor
    group_size: int

    @classmethod
    def build(cls, facts: LocalConvolution, take: TensorSource, name: str) -> Convolution:
        """Take the tensors of `attention_conv` or `mlp_conv` of one layer."""
        return cls(
            base_2KH=take(f"{name}.base_kernel"),
            projection=take(f"{name}.kernel_projection"),
            group_size=facts.group_size,
        )

    def enter(self, x_NH: torch.Tensor, slots_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sub-layer's input [N, H] and what its output's kernels add, [N, K, J].

        Args:
            x_NH: normed stream, blocks one after the other.
            slots_N: index of the row's slot in its block.
        """
        _, num_taps, width = self.base_2KH.shape
        shape = (x_NH.shape[0], 2, num_taps, width // self.group_size)
        dynamic = linear(x_NH, self.projection).view(shape)
        return self._apply(x_NH, dynamic[:, 0], slots_N, side=0), dynamic[:, 1]

    def leave(
        self, x_NH: torch.Tensor, dynamic_NKJ: torch.Tensor, slots_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the sub-layer's output [N, H], mixed."""
        return self._apply(x_NH, dynamic_NKJ, slots_N, side=1)

    def _apply(
        self, x_NH: torch.Tensor, dynamic_NKJ: torch.Tensor, slots_N: torch.Tensor, *, side: int
    ) -> torch.Tensor:
        num_rows = x_NH.shape[0]
        out = torch.zeros(x_NH.shape, dtype=torch.float32, device=x_NH.device)
        for tap in range(self.base_2KH.shape[1]):
            earlier = torch.nn.functional.pad(x_NH, (0, 0, tap, 0))[:num_rows].float()
            extra = dynamic_NKJ[:, tap].float().repeat_interleave(self.group_size, dim=1)
            kernel = self.base_2KH[side, tap].float() + extra
            is_inside = (slots_N >= tap)[:, None]
            out = out + torch.where(is_inside, kernel * earlier, 0.0)
        return out.to(x_NH.dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selector:
    """Reorders the best ids of a slot by the token before it.

    Args:
        facts: rank and number of candidates.
        hidden_projection: [r, H].
        predecessor_Vr: by target id.
        successor_Vr: by target id.
    """

    facts: CandidateSelector
    hidden_projection: torch.Tensor
    predecessor_Vr: torch.Tensor
    successor_Vr: torch.Tensor

    @classmethod
    def build(cls, facts: CandidateSelector, take: TensorSource) -> Selector:
        """Take the selector's tensors."""
        return cls(
            facts=facts,
            hidden_projection=take("selector.hidden_projection"),
            predecessor_Vr=take("selector.predecessor"),
            successor_Vr=take("selector.successor"),
        )

    def select(
        self, logits_MV: torch.Tensor, ids_target_M: torch.Tensor, hidden_MH: torch.Tensor
    ) -> torch.Tensor:
        """Return fp32 [M, V]: scores of the candidates, minus infinity elsewhere.

        Args:
            logits_MV: fp32, of the slots.
            ids_target_M: the token before each slot's prediction.
            hidden_MH: the slots' normed states.
        """
        num_candidates = min(self.facts.top_k, logits_MV.shape[1])
        best_MC, ids_MC = logits_MV.topk(num_candidates, dim=1)
        context_Mr = embed(ids_target_M, self.predecessor_Vr) * linear(
            hidden_MH, self.hidden_projection
        )
        successors_MCr = self.successor_Vr[ids_MC]
        edges_MC = (context_Mr[:, None].float() * successors_MCr.float()).sum(dim=2)
        empty_MV = torch.full_like(logits_MV, float("-inf"))
        return empty_MV.scatter(1, ids_MC, best_MC + edges_MC)
