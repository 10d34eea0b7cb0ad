"""The target: dense Llama-family decoders (llama, mistral, qwen2, qwen3) in one module.

The families differ only in facts that the manifest states (biases, q/k norm, window, tied head,
rotary numbers), so there is one forward.
Legend: N rows, M rows picked by the caller, D hidden, V vocab rows, A captured states, T positions.
*Source:* transformers' `modeling_{llama,mistral,qwen2,qwen3}.py`, which the tests compare against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import embed, embed_stream, head_argmax, head_logits, rms_norm
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.layers import DecoderLayer, TensorSource, layer_source, rope_table
from runtime.models.support import decoder_problems
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import Target


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetOutput:
    """What a target forward returns.

    Args:
        hidden_ND: final-normed states, input of the head.
        aux_hidden_NA: [N, len(ids) * D] in the order of the ids asked for; None when none were.
    """

    hidden_ND: torch.Tensor
    aux_hidden_NA: torch.Tensor | None


def target_problems(target: Target) -> list[Diagnostic]:
    """Return every reason in the facts why this target cannot run (codes: `decoder_problems`)."""
    return decoder_problems(target.decoder, where="manifest#/target/decoder")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetModel:
    """Weights of a target and its forward.

    Args:
        facts: manifest section that it was built from.
        embedding_VD: input embedding.
        layers: decoder layers in order.
        norm_D: final norm.
        head_VD: output head, the embedding itself when tied.
        cos_sin_TP: fp32 rotary table, one row per position that the model knows.
    """

    facts: Target
    embedding_VD: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    norm_D: torch.Tensor
    head_VD: torch.Tensor
    cos_sin_TP: torch.Tensor

    @classmethod
    def build(cls, facts: Target, take: TensorSource) -> TargetModel:
        """Build the model from tensors with the roles and shapes of `layers.target_shapes`."""
        decoder = facts.decoder
        embedding = take("embedding")
        layers = tuple(
            DecoderLayer.build(decoder, layer_source(take, index), layer_index=index)
            for index in range(decoder.num_layers)
        )
        return cls(
            facts=facts,
            embedding_VD=embedding,
            layers=layers,
            norm_D=take("norm"),
            head_VD=embedding if facts.is_head_tied else take("head"),
            cos_sin_TP=rope_table(
                decoder.rope,
                head_dim=decoder.head_dim,
                num_positions=decoder.max_position_embeddings,
                device=embedding.device,
            ),
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with one cache layer."""
        return len(self.layers)

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        return tuple(layer.attention.kv_spec for layer in self.layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and cache."""
        return self.embedding_VD.dtype

    @property
    def max_positions(self) -> int:
        """Rows of the rotary table; positions are below it."""
        return self.cos_sin_TP.shape[0]

    @property
    def num_reachable_ids(self) -> int:
        """Target ids that can be chosen: rows beyond the tokenizer are padding of the matrix."""
        size = self.facts.tokenizer_size
        return self.facts.vocab_size if size is None else min(size, self.facts.vocab_size)

    def embed(self, ids_target_N: torch.Tensor) -> torch.Tensor:
        """Return embedding rows [N, D] of target ids."""
        return embed(ids_target_N, self.embedding_VD)

    def forward(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run all layers on the rows of `batch`, writing their keys and values.

        Args:
            batch: rows, positions, slots and block tables; ids are target ids.
            kv: this model's cache layers, `num_layers` of them.
            aux_layer_ids: states to capture: i is the residual stream after layer i (before the
                final norm), -1 the embedding output.

        Returns:
            Final-normed states and the captured states side by side.

        Exactness: every row's numbers depend on that row, its position and its keys alone.
        """
        norms = (*(layer.input_norm for layer in self.layers), self.norm_D)
        stream = embed_stream(batch.ids_target_N, self.embedding_VD, norms[0])
        residuals = {-1: stream.residual_MD}
        layers = zip(self.layers, kv, norms[1:], strict=True)
        for index, (layer, cache, next_norm) in enumerate(layers):
            stream = layer.advance(stream, batch, cache, self.cos_sin_TP, next_norm_D=next_norm)
            if index in aux_layer_ids:
                residuals[index] = stream.residual_MD
        hidden = rms_norm(stream.residual_MD, self.norm_D, self.facts.decoder.rms_norm_eps)
        return TargetOutput(
            hidden_ND=hidden,
            aux_hidden_NA=(
                torch.cat([residuals[i] for i in aux_layer_ids], dim=1) if aux_layer_ids else None
            ),
        )

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [M, V] over target ids; ids that cannot be chosen are -inf."""
        logits = head_logits(hidden_MD, self.reachable_head)
        padding = self.facts.vocab_size - self.num_reachable_ids
        return torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))

    def greedy_ids(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return int64 target ids [M]: the argmax of `logits`, lowest id on a tie, same bits."""
        ids, _ = head_argmax(hidden_MD, self.reachable_head)
        return ids

    @property
    def reachable_head(self) -> torch.Tensor:
        """Rows [num_reachable_ids, D] of the head: `logits` and `greedy_ids` multiply these."""
        return self.head_VD[: self.num_reachable_ids]
