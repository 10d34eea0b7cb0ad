"""Block drafts (DFlash, DFlash2, DSpark): one forward fills the slots [anchor, mask, mask, ...].

The draft has no tokens of its own behind the anchor: every layer's keys and values of a context
position are projections of h_ctx = norm(fc(target states there)), written once by `write_context`.
A block sits at positions L, L + 1, ... and sees the context and itself; its keys and values lie in
slots that nothing else reads and that `write_context` overwrites when the positions become final.
Legend: N rows, M rows picked by the caller, A captured states, H draft hidden, R draft vocab,
T positions, V target vocab.
*Source:* arXiv 2602.06036 (DFlash), 2607.05147 (DSpark); Speculators 0.9 dflash and dspark, whose
windows count from the anchor for all slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from runtime.batch import PreparedBatch
from runtime.kernels import RowNorm, Stream, linear, rms_norm
from runtime.kernels.context_kv import write_context_kv
from runtime.kv import KVLayer, KVLayerSpec
from runtime.models.block_heads import Confidence, Markov
from runtime.models.dflash2 import Convolution, Selector
from runtime.models.eagle3 import Fuse
from runtime.models.layers import DecoderLayer, TensorSource, decoder_rope_table, layer_source
from runtime.models.support import decoder_problems
from runtime.models.vocabulary import VocabEmbedding, VocabHead
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import Decoder, Draft, Geometry


def block_problems(draft: Draft) -> list[Diagnostic]:
    """Return every reason in the facts why this draft cannot run (codes: `decoder_problems`)."""
    return decoder_problems(draft.decoder, where="manifest#/draft/decoder")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockRows:
    """The slots of some blocks.

    Args:
        batch: a row per slot, blocks one after the other; ids are the anchor's and the mask's.
        anchors_N: int64, position of slot 0 of the row's block.
        ends_N: int64, position of its last slot.
    """

    batch: PreparedBatch
    anchors_N: torch.Tensor
    ends_N: torch.Tensor

    def seen(self, *, is_causal: bool) -> PreparedBatch:
        """Return the batch of a layer: the slots that a row may see, windows from the anchor on."""
        limits = None if is_causal else self.ends_N
        return replace(self.batch, limits_N=limits, window_positions_N=self.anchors_N)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLayer:
    """One layer of a block draft.

    Args:
        layer: weights.
        is_causal: whether a slot sees the slots before it only.
        convolutions: around attention and around the MLP; DFlash2 only.
    """

    layer: DecoderLayer
    is_causal: bool
    convolutions: tuple[Convolution, Convolution] | None

    @classmethod
    def build(
        cls, facts: Draft, take: TensorSource, *, layer_index: int, ranks: Ranks = ONE_RANK
    ) -> BlockLayer:
        """Take the tensors of layer `layer_index`; `take` knows roles without the layer prefix."""
        decoder = facts.decoder
        stated = None if facts.block is None else facts.block.is_causal
        is_sliding = decoder.layer_types[layer_index] == "sliding_attention"
        taps = None if facts.block is None else facts.block.convolution
        return cls(
            layer=DecoderLayer.build(
                _beside_anchor(decoder), take, layer_index=layer_index, ranks=ranks
            ),
            is_causal=is_sliding if stated is None else stated,
            convolutions=None
            if taps is None
            else (
                Convolution.build(taps, take, "attention_conv"),
                Convolution.build(taps, take, "mlp_conv"),
            ),
        )

    def write_context(
        self,
        context_NH: torch.Tensor,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
    ) -> None:
        """Write keys and values of context positions; the rows are h_ctx."""
        attention = self.layer.attention
        num_q_rows = attention.num_heads * attention.head_dim
        bias = attention.qkv_bias
        kv = linear(
            context_NH,
            attention.qkv_weight[num_q_rows:],
            None if bias is None else bias[num_q_rows:],
        ).view(context_NH.shape[0], 2 * attention.num_kv_heads, attention.head_dim)
        norm = None
        if attention.k_norm is not None:
            norm = RowNorm(weight_D=attention.k_norm, eps=attention.rms_norm_eps)
        write_context_kv(kv, norm, batch.positions_N, cos_sin_TP, cache, batch.slots_N)

    def advance(
        self,
        stream: Stream,
        rows: BlockRows,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        next_norm_H: torch.Tensor,
    ) -> Stream:
        """Return the stream after this layer, at the norm whose weight is `next_norm_H`."""
        batch = rows.seen(is_causal=self.is_causal)
        return self.layer.advance(stream, batch, cache, cos_sin_TP, next_norm_D=next_norm_H)

    def convolve(
        self, x_NH: torch.Tensor, rows: BlockRows, cache: KVLayer, cos_sin_TP: torch.Tensor
    ) -> torch.Tensor:
        """Return the stream [N, H] after a layer with convolutions, which no product absorbs."""
        layer, eps = self.layer, self.layer.rms_norm_eps
        assert self.convolutions is not None, "the layer has no convolutions"
        around_attention, around_mlp = self.convolutions
        slots_N = rows.batch.positions_N - rows.anchors_N
        batch = rows.seen(is_causal=self.is_causal)
        entered, dynamic = around_attention.enter(rms_norm(x_NH, layer.input_norm, eps), slots_N)
        attended = layer.attention.forward(entered, batch, cache, cos_sin_TP)
        x_NH = x_NH + around_attention.leave(attended, dynamic, slots_N)
        entered, dynamic = around_mlp.enter(rms_norm(x_NH, layer.post_attention_norm, eps), slots_N)
        return x_NH + around_mlp.leave(layer.mlp.forward(entered), dynamic, slots_N)


def _beside_anchor(decoder: Decoder) -> Decoder:
    """Return the facts with windows that hold the anchor and `sliding_window` positions before."""
    if decoder.sliding_window is None:
        return decoder
    return msgspec.structs.replace(decoder, sliding_window=decoder.sliding_window + 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockModel:
    """Weights of a block draft and its two forwards: context and block.

    Args:
        facts: manifest section that it was built from.
        max_drafts: drafts that one block yields.
        sample_from_anchor: slot k predicts the token after its own position, slot 0 included;
            false: slot k predicts the token at its position, slot 0 nothing.
        embedding: over *target* ids: its own or the target's.
        fusion: fc.
        context_norm_H: norm after fc.
        norm_H: norm before the head.
        head: over *draft* ids.
        draft_to_target_R: int64, absolute target id of each draft id.
        cos_sin_TP: fp32 rotary table of the draft's own numbers.
        markov: None for DFlash.
        confidence: None without that head.
        selector: DFlash2 only.
    """

    facts: Draft
    max_drafts: int
    sample_from_anchor: bool
    embedding: VocabEmbedding
    fusion: Fuse
    context_norm_H: torch.Tensor
    layers: tuple[BlockLayer, ...]
    norm_H: torch.Tensor
    head: VocabHead
    draft_to_target_R: torch.Tensor
    cos_sin_TP: torch.Tensor
    markov: Markov | None
    confidence: Confidence | None
    selector: Selector | None

    @classmethod
    def build(
        cls,
        facts: Draft,
        take: TensorSource,
        *,
        geometry: Geometry,
        embedding: VocabEmbedding,
        head: VocabHead,
        draft_to_target_R: torch.Tensor,
        num_positions: int,
        ranks: Ranks = ONE_RANK,
    ) -> BlockModel:
        """Build the model from tensors with the roles and shapes of `layers.block_shapes`.

        Args:
            facts: manifest section.
            take: role -> tensor.
            geometry: the trained block and what its slot 0 is.
            embedding: resolved input embedding over target ids.
            head: resolved head over draft ids.
            draft_to_target_R: int64 absolute target ids in draft-id order.
            num_positions: rows of the rotary table.
            ranks: who holds the other shards of the layers; fc, convolutions and the small heads
                are whole on every rank.
        """
        decoder, size = facts.decoder, geometry.draft_block_size
        assert size is not None, "the manifest of a block draft states its block"
        assert geometry.sample_from_anchor is not None, "and what its slot 0 is"
        choice = None if facts.block is None else facts.block.selector
        markov = None
        if facts.markov is not None:
            markov = Markov.build(facts.markov, take, draft_to_target_R=draft_to_target_R)
        return cls(
            facts=facts,
            max_drafts=size if geometry.sample_from_anchor else size - 1,
            sample_from_anchor=geometry.sample_from_anchor,
            embedding=embedding,
            fusion=Fuse.build(facts, take),
            context_norm_H=take("hidden_norm"),
            layers=tuple(
                BlockLayer.build(facts, layer_source(take, index), layer_index=index, ranks=ranks)
                for index in range(decoder.num_layers)
            ),
            norm_H=take("norm"),
            head=head,
            draft_to_target_R=draft_to_target_R,
            cos_sin_TP=decoder_rope_table(
                decoder, num_positions=num_positions, device=embedding.weight_RD.device
            ),
            markov=markov,
            confidence=Confidence.build(facts, take) if facts.has_confidence_head else None,
            selector=None if choice is None else Selector.build(choice, take),
        )

    @property
    def embedding_VH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the input embedding that this rank holds."""
        return self.embedding.weight_RD

    @property
    def head_RH(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Rows of the head that this rank holds, one per draft id."""
        return self.head.reachable_rows

    @property
    def kv_specs(self) -> tuple[KVLayerSpec, ...]:
        """Cache needs, one per layer."""
        return tuple(layer.layer.attention.kv_spec for layer in self.layers)

    @property
    def max_positions(self) -> int:
        """Context that the draft was made for; rows beyond it compute but are not meant."""
        return self.facts.decoder.max_position_embeddings

    @property
    def mask_id_target(self) -> int:
        """Id that the slots after the anchor are fed."""
        assert self.facts.mask_token_id is not None, "the manifest of a block draft has a mask id"
        return self.facts.mask_token_id

    @property
    def first_slot(self) -> int:
        """The slot that predicts the first draft."""
        return 0 if self.sample_from_anchor else 1

    def write_context(
        self, batch: PreparedBatch, states_NA: torch.Tensor, kv: Sequence[KVLayer]
    ) -> None:
        """Write the draft's keys and values of final positions.

        Args:
            batch: positions and slots; ids are not read.
            states_NA: the target's captured states there, lowest layer first.
            kv: this draft's cache layers, one per layer.
        """
        context = rms_norm(
            self.fusion.forward(states_NA), self.context_norm_H, self.facts.decoder.rms_norm_eps
        )
        for layer, cache in zip(self.layers, kv, strict=True):
            layer.write_context(context, batch, cache, self.cos_sin_TP)

    def forward(self, rows: BlockRows, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Return the normed states [N, H] of all slots, input of the heads.

        Args:
            rows: blocks behind a context that `write_context` wrote.
            kv: this draft's cache layers; the blocks' slots are overwritten.
        """
        if self.layers[0].convolutions is not None:
            x_NH = self.embedding.rows(rows.batch.ids_target_N)
            for layer, cache in zip(self.layers, kv, strict=True):
                x_NH = layer.convolve(x_NH, rows, cache, self.cos_sin_TP)
            return rms_norm(x_NH, self.norm_H, self.facts.decoder.rms_norm_eps)
        norms = (*(layer.layer.input_norm for layer in self.layers), self.norm_H)
        stream = self.embedding.stream(rows.batch.ids_target_N, norms[0])
        for layer, cache, norm in zip(self.layers, kv, norms[1:], strict=True):
            stream = layer.advance(stream, rows, cache, self.cos_sin_TP, next_norm_H=norm)
        return rms_norm(stream.residual_MD, self.norm_H, self.facts.decoder.rms_norm_eps)

    def base_logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [M, R] over draft ids, before any correction."""
        return self.head.logits(hidden_MH)

    def best_ids(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Return int64 target ids [M]: the highest base logits, the lowest draft id on a tie."""
        return self.head.argmax(hidden_MH, names_V=self.draft_to_target_R)

    def select(
        self, logits_MR: torch.Tensor, ids_target_M: torch.Tensor, hidden_MH: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits that a draft is chosen by: a selector's scores, else the logits.

        Args:
            logits_MR: fp32, corrected by a Markov head where there is one.
            ids_target_M: the token before each slot's prediction.
            hidden_MH: the slots' normed states.
        """
        if self.selector is None:
            return logits_MR
        return self.selector.select(logits_MR, ids_target_M, hidden_MH)
