"""DSpark's heads: Markov corrects the logits of a slot, confidence says how sure its draft is.

Both read the token before the slot as a *target* id; the correction is over *draft* ids.
Legend: B requests, H draft hidden, M rank, V target vocab, R draft vocab, C confidence input.
*Source:* arXiv 2607.05147; Speculators 0.9 dspark (`vanilla`, `gated`, `rnn` heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels import corrected_argmax, embed, head_logits, linear
from runtime.models.layers import TensorSource
from specctl.contract.manifest import Draft, MarkovHead


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MarkovStep:
    """What a Markov head makes of one slot.

    Args:
        features_BM: what the correction is made of; see `Markov.bias`.
        previous_BM: embedding of the token before the slot, which the confidence head reads.
        state_BM: of the recurrence, for the next slot.
    """

    features_BM: torch.Tensor
    previous_BM: torch.Tensor
    state_BM: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Markov:
    """Low-rank correction of a slot's logits by the token before it.

    Args:
        facts: kind and rank.
        w1_VM: embedding of the token before, rows are target ids.
        w2_RM: rows are draft ids.
        mixer: weight of the gate [M, H + M] or of the recurrence [3 M, H + 2 M]; None for vanilla.
        mixer_bias: [M] or [3 M]; None for vanilla.
    """

    facts: MarkovHead
    w1_VM: torch.Tensor
    w2_RM: torch.Tensor
    mixer: torch.Tensor | None
    mixer_bias: torch.Tensor | None

    @classmethod
    def build(
        cls, facts: MarkovHead, take: TensorSource, *, draft_to_target_R: torch.Tensor
    ) -> Markov:
        """Take the head's tensors; of w2 over the whole vocabulary, the rows in draft-id order."""
        w2 = take("markov_w2")
        if w2.shape[0] != draft_to_target_R.shape[0]:
            w2 = w2[draft_to_target_R]
        name = {"vanilla": None, "gated": "markov_gate", "rnn": "markov_joint"}[facts.kind]
        return cls(
            facts=facts,
            w1_VM=take("markov_w1"),
            w2_RM=w2,
            mixer=None if name is None else take(f"{name}.weight"),
            mixer_bias=None if name is None else take(f"{name}.bias"),
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether a slot changes the state of the next one."""
        return self.facts.kind == "rnn"

    @property
    def is_plain(self) -> bool:
        """Whether a correction is made of the token before the slot alone."""
        return self.facts.kind == "vanilla"

    def embed(self, ids_target_N: torch.Tensor) -> torch.Tensor:
        """Return [N, M], the embeddings of tokens before a slot."""
        return embed(ids_target_N, self.w1_VM)

    def initial_state(self, num_requests: int) -> torch.Tensor:
        """Return the zero state [B, M] before slot 0; only the recurrence changes it."""
        return self.w1_VM.new_zeros((num_requests, self.facts.rank))

    def step(
        self, ids_target_B: torch.Tensor, hidden_BH: torch.Tensor, state_BM: torch.Tensor
    ) -> MarkovStep:
        """Return what the correction of one slot is made of.

        Args:
            ids_target_B: int64, the token before the slot's prediction.
            hidden_BH: the slot's normed state.
            state_BM: of the slot before.
        """
        previous = self.embed(ids_target_B)
        features = previous
        if self.facts.kind == "gated":
            gate = torch.sigmoid(self._mix(torch.cat((hidden_BH, previous), dim=1)))
            features = gate * previous
        elif self.facts.kind == "rnn":
            joined = self._mix(torch.cat((state_BM, previous, hidden_BH), dim=1))
            gate, candidate, output = joined.chunk(3, dim=1)
            gate = torch.sigmoid(gate)
            state_BM = gate * state_BM + (1.0 - gate) * torch.tanh(candidate)
            features = torch.tanh(output)
        return MarkovStep(features_BM=features, previous_BM=previous, state_BM=state_BM)

    def bias(self, features_BM: torch.Tensor) -> torch.Tensor:
        """Return fp32 [B, R], added to a slot's logits over draft ids."""
        return head_logits(features_BM, self.w2_RM)

    def best_ids(
        self,
        logits_BR: torch.Tensor,
        features_BM: torch.Tensor | None,
        ids_target_B: torch.Tensor,
        *,
        names_R: torch.Tensor,
        copy_B: torch.Tensor,
    ) -> torch.Tensor:
        """Return int64 target ids [B]: the highest of a slot's logits and `bias`, lowest draft id.

        Args:
            logits_BR: fp32, before the correction.
            features_BM: of `step`; None of a plain head, whose token says it all.
            ids_target_B: int64, the token before the slot's prediction.
            names_R: int64, target id of each draft id.
            copy_B: int64 with any stride, takes the ids, too.
        """
        rows, ids = (self.w1_VM, ids_target_B) if features_BM is None else (features_BM, None)
        best_B, _ = corrected_argmax(
            logits_BR, rows, self.w2_RM, ids_M=ids, names_V=names_R, copy_M=copy_B
        )
        return best_B

    def _mix(self, joined: torch.Tensor) -> torch.Tensor:
        assert self.mixer is not None, f"a {self.facts.kind} head has no mixing weight"
        return linear(joined, self.mixer, self.mixer_bias)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Confidence:
    """Chance that the target agrees with a draft, given that it agreed with those before.

    Args:
        weight: [1, C], columns of the slot's state first.
        bias: [1].
        reads_markov: whether the token before is among the input.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    reads_markov: bool

    @classmethod
    def build(cls, facts: Draft, take: TensorSource) -> Confidence:
        """Take the head's tensors."""
        return cls(
            weight=take("confidence.weight"),
            bias=take("confidence.bias"),
            reads_markov=facts.is_confidence_with_markov and facts.markov is not None,
        )

    def logits(self, hidden_BH: torch.Tensor, previous_BM: torch.Tensor | None) -> torch.Tensor:
        """Return fp32 [B]: log odds of the drafts of slots.

        Args:
            hidden_BH: the slots' normed states.
            previous_BM: `MarkovStep.previous_BM`; None where `reads_markov` is false.
        """
        features = hidden_BH
        if self.reads_markov:
            assert previous_BM is not None, "the confidence head reads the Markov embedding"
            features = torch.cat((hidden_BH, previous_BM), dim=1)
        return linear(features, self.weight, self.bias, out_dtype=torch.float32).squeeze(1)
