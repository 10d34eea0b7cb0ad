"""The target: dense Llama-family decoders (llama, mistral, qwen2, qwen3) in one module.

The families differ only in facts that the manifest states (biases, q/k norm, window, tied head,
rotary numbers), so there is one forward. A model is one stage of a target on one rank; the whole
target on one device is the stage that holds everything.
Legend: N rows, M rows picked by the caller, D hidden, V vocab rows, A captured states, T positions.
*Source:* transformers' `modeling_{llama,mistral,qwen2,qwen3}.py`, which the tests compare against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import (
    HeadRows,
    RowNorm,
    Stream,
    embed_stream,
    enter_stream,
    rms_norm,
    side_by_side,
)
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.layers import DecoderLayer, TensorSource, decoder_rope_table, layer_source
from runtime.models.support import decoder_problems
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import Target
from specctl.contract.stage_split import Stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetOutput:
    """What a target forward returns.

    Args:
        hidden_ND: the residual stream after the last layer, input of the head, which norms it;
            `final_states` norms it for others.
        aux_hidden_NA: [N, len(ids) * D] in the order of the ids asked for; None when none were.
        stream: `hidden_ND` at the final norm, as the last layer wrote it; None: it came alone.
    """

    hidden_ND: torch.Tensor
    aux_hidden_NA: torch.Tensor | None
    stream: Stream | None = None

    @property
    def head_rows(self) -> HeadRows:
        """What the head reads: the same logits either way, and one launch less from a stream."""
        return self.hidden_ND if self.stream is None else self.stream


def target_problems(target: Target) -> list[Diagnostic]:
    """Return every reason in the facts why this target cannot run (codes: `decoder_problems`)."""
    return decoder_problems(target.decoder, where="manifest#/target/decoder")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageStates:
    """What one stage hands to the next.

    Args:
        residual_ND: the residual stream after the stage's last layer.
        captured: layer id -> residual stream [N, D] after that layer, of the ids asked for so far;
            -1 is the embedding output.
        aux_NA: the captured states side by side where layers wrote them so.
        stream: `residual_ND` at the final norm where the stage has that; a hand-off drops it.
    """

    residual_ND: torch.Tensor
    captured: Mapping[int, torch.Tensor]
    aux_NA: torch.Tensor | None = None
    stream: Stream | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetModel:
    """Weights of one stage of a target, on one rank, and its forward.

    Args:
        facts: manifest section that it was built from.
        first_layer: of the target, the first one here.
        layers: consecutive decoder layers.
        embedding: input embedding; None beyond the first stage.
        norm_D: final norm; None before the last stage.
        head: output head over the ids that can be chosen, the embedding's rows when tied; None
            before the last stage.
        cos_sin_TP: fp32 rotary table, one row per position that the model knows.
    """

    facts: Target
    first_layer: int
    layers: tuple[DecoderLayer, ...]
    embedding: VocabEmbedding | None
    norm_D: torch.Tensor | None
    head: VocabHead | None
    cos_sin_TP: torch.Tensor

    @classmethod
    def build(
        cls,
        facts: Target,
        take: TensorSource,
        *,
        stage: Stage | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> TargetModel:
        """Build the model from tensors with the roles of `layers.target_shapes`.

        Args:
            facts: manifest section of the whole target.
            take: role -> this rank's shard.
            stage: which part of the target; None: all of it.
            ranks: who holds the other shards of the stage.
        """
        decoder = facts.decoder
        first, end = (
            (0, decoder.num_layers) if stage is None else (stage.first_layer, stage.end_layer)
        )
        layers = tuple(
            DecoderLayer.build(decoder, layer_source(take, index), layer_index=index, ranks=ranks)
            for index in range(first, end)
        )
        embedding = None
        if stage is None or stage.has_embedding:
            embedding = VocabEmbedding(weight_RD=take("embedding"), ranks=ranks)
        norm, head = None, None
        if stage is None or stage.has_head:
            norm = take("norm")
            is_shared = facts.is_head_tied and embedding is not None
            rows = embedding.weight_RD if is_shared and embedding is not None else take("head")
            head = VocabHead(weight_RD=rows, num_ids=num_reachable_ids(facts), ranks=ranks)
        return cls(
            facts=facts,
            first_layer=first,
            layers=layers,
            embedding=embedding,
            norm_D=norm,
            head=head,
            cos_sin_TP=decoder_rope_table(
                decoder,
                num_positions=decoder.max_position_embeddings,
                device=layers[0].input_norm.device,
            ),
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers here, each with one cache layer."""
        return len(self.layers)

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        return tuple(layer.attention.kv_spec for layer in self.layers)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[0].input_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and cache."""
        return self.layers[0].input_norm.dtype

    @property
    def max_positions(self) -> int:
        """Rows of the rotary table; positions are below it."""
        return self.cos_sin_TP.shape[0]

    @property
    def embedding_VD(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the input embedding that this rank holds; only on the first stage."""
        assert self.embedding is not None, f"no embedding on the stage of layer {self.first_layer}"
        return self.embedding.weight_RD

    @property
    def head_VD(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the head that this rank holds; only on the last stage."""
        return self._last_head.weight_RD

    @property
    def num_reachable_ids(self) -> int:
        """Target ids that can be chosen."""
        return num_reachable_ids(self.facts)

    def embed(self, ids_target_N: torch.Tensor) -> torch.Tensor:
        """Return embedding rows [N, D] of target ids; only on the first stage."""
        assert self.embedding is not None, f"no embedding on the stage of layer {self.first_layer}"
        return self.embedding.rows(ids_target_N)

    def forward(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...] = (),
        on_layer: Callable[[int], None] | None = None,
    ) -> TargetOutput:
        """Run a whole target on the rows of `batch`, writing their keys and values.

        Args:
            batch: rows, positions, slots and block tables; ids are target ids.
            kv: this model's cache layers, `num_layers` of them.
            aux_layer_ids: states to capture: i is the residual stream after layer i (before the
                final norm), -1 the embedding output.
            on_layer: called with the id of each layer whose kernels were launched.

        Returns:
            The states that the head reads and the captured states side by side.

        Exactness: every row's numbers depend on that row, its position and its keys alone.
        """
        states = self.run_stage(batch, kv, aux_layer_ids, on_layer=on_layer)
        return self.finish(states, aux_layer_ids)

    def run_stage(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...] = (),
        states: StageStates | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> StageStates:
        """Run this stage's layers.

        Args:
            batch: as in `forward`, the same on every stage.
            kv: as in `forward`.
            aux_layer_ids: as in `forward`; those of this stage are captured.
            states: what the stage before handed over; None on the first stage.
            on_layer: as in `forward`.

        Exactness: a hand-off moves no bit: the stream enters with the squares that the product
        before it would have written.
        """
        last_norm = self.layers[-1].input_norm if self.norm_D is None else self.norm_D
        norms = (*(layer.input_norm for layer in self.layers), last_norm)
        aux_NA, rooms = self._room(batch, aux_layer_ids)
        if states is None:
            assert self.embedding is not None, "the first stage embeds"
            stream = self.embedding.stream(batch.ids_target_N, norms[0], rooms.get(-1))
            captured = {-1: stream.residual_MD} if -1 in aux_layer_ids else {}
        else:
            stream = enter_stream(states.residual_ND, norms[0])
            captured = dict(states.captured)
        layers = zip(self.layers, kv, norms[1:], strict=True)
        for index, (layer, cache, next_norm) in enumerate(layers, start=self.first_layer):
            stream = layer.advance(
                stream,
                batch,
                cache,
                self.cos_sin_TP,
                next_norm_D=next_norm,
                out_ND=rooms.get(index),
            )
            if index in aux_layer_ids:
                captured[index] = stream.residual_MD
            if on_layer is not None:
                on_layer(index)
        return StageStates(
            residual_ND=stream.residual_MD,
            captured=captured,
            aux_NA=aux_NA,
            stream=None if self.norm_D is None else stream,
        )

    def finish(self, states: StageStates, aux_layer_ids: tuple[int, ...] = ()) -> TargetOutput:
        """Return the output of a forward from the last stage's states."""
        aux_NA = states.aux_NA
        if aux_NA is None and aux_layer_ids:
            aux_NA = side_by_side([states.captured[index] for index in aux_layer_ids])
        return TargetOutput(
            hidden_ND=states.residual_ND, aux_hidden_NA=aux_NA, stream=states.stream
        )

    def _room(
        self, batch: PreparedBatch, aux_layer_ids: tuple[int, ...]
    ) -> tuple[torch.Tensor | None, Mapping[int, torch.Tensor]]:
        """Return where captured states lie side by side, and the place of each in it by its id.

        Nothing where several ranks or stages make them, or one is asked for twice.
        """
        count = len(aux_layer_ids)
        is_whole = self.embedding is not None and self.norm_D is not None
        if not is_whole or self.layers[0].mlp.ranks.size > 1 or count == 0:
            return None, {}
        if len(set(aux_layer_ids)) < count or not set(aux_layer_ids) <= {
            *range(-1, self.num_layers)
        }:
            return None, {}
        width = self.facts.decoder.hidden_size
        aux_NA = self.embedding_VD.new_empty((batch.num_rows, count * width))
        return aux_NA, dict(zip(aux_layer_ids, aux_NA.chunk(count, dim=1), strict=True))

    def final_states(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return the final-normed states [M, D] that drafts of the last state read."""
        norm = self._last_norm
        return rms_norm(hidden_MD, norm.weight_D, norm.eps)

    def final_stream(self, hidden_ND: torch.Tensor, rows_M: torch.Tensor) -> Stream:
        """Return the rows that an index picks as `greedy_ids` reads them."""
        return embed_stream(rows_M, hidden_ND, self._last_norm.weight_D)

    def logits(self, hidden_MD: HeadRows) -> torch.Tensor:
        """Return fp32 logits [M, V] over target ids; ids that cannot be chosen are -inf.

        A stream is one at the final norm.
        """
        logits = self.reachable_logits(hidden_MD)
        padding = self.facts.vocab_size - self.num_reachable_ids
        return torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))

    def reachable_logits(self, hidden_MD: HeadRows) -> torch.Tensor:
        """Return `logits` of the ids that can be chosen, the first ones; ids behind them are -inf.

        A choice from them is one from `logits`, without a copy.
        """
        return self._last_head.logits(hidden_MD, self._last_norm)

    def greedy_ids(self, hidden_MD: HeadRows) -> torch.Tensor:
        """Return int64 target ids [M]: the argmax of `logits`, lowest id on a tie, same bits.

        A stream is one at the final norm.
        """
        return self._last_head.argmax(hidden_MD, self._last_norm)

    @property
    def reachable_head(self) -> torch.Tensor:
        """Rows of this rank's head that `logits` and `greedy_ids` multiply."""
        return self._last_head.reachable_rows

    @property
    def _last_norm(self) -> RowNorm:
        assert self.norm_D is not None, f"no final norm on the stage of layer {self.first_layer}"
        return RowNorm(weight_D=self.norm_D, eps=self.facts.decoder.rms_norm_eps)

    @property
    def _last_head(self) -> VocabHead:
        assert self.head is not None, f"no head on the stage of layer {self.first_layer}"
        return self.head


def num_reachable_ids(target: Target) -> int:
    """Return how many target ids can be chosen: rows beyond the tokenizer pad the matrix."""
    size = target.tokenizer_size
    return target.vocab_size if size is None else min(size, target.vocab_size)
