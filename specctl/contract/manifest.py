"""The manifest: every fact about a target and its draft, each with its origin, in one file.

Invariants: values are frozen and complete; unknown keys are refused; every leaf has an origin,
found by longest path prefix in `origins` (`geometry.num_speculative_tokens`, else `geometry`, ...).
Paths in `source` are relative to the manifest's directory when inside it, otherwise absolute.
Aux layer ids are 0-based and mean the *output of that layer*; -1 is the embedding output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

SCHEMA_VERSION = 1

OriginKind = Literal["read", "derived", "given"]
VerificationMode = Literal["seeded", "rejection"]
DraftAlgorithm = Literal["eagle3", "dspark", "mtp", "dflash", "eagle", "dflash2", "peagle"]
"""Drafts that a manifest can describe."""
BLOCK_DRAFTS: tuple[DraftAlgorithm, ...] = ("dspark", "dflash", "dflash2")
"""Those that fill a block of slots in one forward."""
PARALLEL_DRAFTS: tuple[DraftAlgorithm, ...] = ("peagle",)
"""Those whose one forward has a slot for each draft, without a trained block size."""
LAST_STATE_DRAFTS: tuple[DraftAlgorithm, ...] = ("mtp", "eagle")
"""Those that read the target's state after its final norm, and capture no layer's."""
HIDDEN_ACTS = ("silu",)
"""Activations of feed-forward layers that the runtime computes; a manifest can state others."""
T = TypeVar("T")
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]


class _Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all manifest sections: frozen, keyword-only, unknown keys refused."""


class Origin(_Facts, frozen=True, kw_only=True):
    """Where a value comes from.

    Args:
        kind: `read` from a file, `derived` by a named rule, `given` by the user.
        where: `config.json#/hidden_size`, `model.safetensors::d2t`, `--num-speculative-tokens`.
        rule: for `derived`: the rule's name or one-line statement.
    """

    kind: OriginKind
    where: str
    rule: str | None = None


def find_origin(origins: Mapping[str, T], path: str) -> T | None:
    """Return the entry of a fact's dotted path or of its longest prefix that has one."""
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        origin = origins.get(".".join(parts[:depth]))
        if origin is not None:
            return origin
    return None


class WeightFile(_Facts, frozen=True, kw_only=True):
    """One weight file of a source.

    Args:
        file: name relative to the source directory.
        size_bytes: whole file.
        header_digest: `sha256:` of a safetensors header's JSON bytes; of a PyTorch zip archive's
            central directory.
    """

    file: str
    size_bytes: NonNegativeInt
    header_digest: str


class TensorRef(_Facts, frozen=True, kw_only=True):
    """One tensor on disk.

    Args:
        key: name in the file.
        file: weight file, relative to the source directory.
        shape: as stored, [out, in] for linears.
        dtype: safetensors spelling (`BF16`, `F32`, `I64`, `BOOL`).
        begin: absolute byte offset of the first byte in the file.
        end: absolute byte offset after the last byte.
    """

    key: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    begin: NonNegativeInt
    end: NonNegativeInt


class Rope(_Facts, frozen=True, kw_only=True):
    """Rotary embedding facts; `parameters` holds the scaling numbers of `kind` (default: empty)."""

    theta: float
    kind: str = "default"
    parameters: dict[str, float | int | bool | str | list[float] | None] = {}


class Decoder(_Facts, frozen=True, kw_only=True):
    """Shape of a stack of decoder layers (target or draft); hidden sizes in elements.

    Args:
        family: naming and arithmetic family of the layers.
        head_dim: taken from the q projection's rows when the config has none.
        layer_types: one of `full_attention`, `sliding_attention` per layer.
        sliding_window: tokens a sliding layer sees, None where no layer slides.
    """

    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden_act: str
    rms_norm_eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    rope: Rope
    max_position_embeddings: PositiveInt
    layer_types: tuple[str, ...]
    sliding_window: int | None


class Target(_Facts, frozen=True, kw_only=True):
    """Facts of the target model.

    Args:
        source: directory, relative to the manifest's when inside it, or absolute; or a hub source.
        revision: commit of the files, ModelScope's branch or tag; None when nothing says so.
        config_digest: `sha256:` of config.json's bytes.
        dtype: storage dtype of the matrices (`BF16`).
        vocab_size: rows of the embedding, may exceed the tokenizer's size.
        tokenizer_size: number of tokenizer entries, None without a tokenizer.
        eos_token_ids: every end id of config, generation config and tokenizer, ascending.
    """

    source: str
    revision: str | None
    architecture: str
    config_digest: str
    dtype: str
    decoder: Decoder
    vocab_size: PositiveInt
    tokenizer_size: int | None
    tokenizer_digest: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding: TensorRef
    head: TensorRef
    is_head_tied: bool
    files: tuple[WeightFile, ...]


class MarkovHead(_Facts, frozen=True, kw_only=True):
    """DSpark's sequential head: w1 rows are *target* ids, w2 rows are *draft* ids."""

    rank: PositiveInt
    kind: Literal["vanilla", "gated", "rnn"]


class LocalConvolution(_Facts, frozen=True, kw_only=True):
    """DFlash2: every slot is mixed with the slots before it around attention and MLP.

    Args:
        kernel_size: slots that are mixed, the own one included.
        group_size: channels that share what the slot's state adds to the kernel.
    """

    kernel_size: PositiveInt
    group_size: PositiveInt


class CandidateSelector(_Facts, frozen=True, kw_only=True):
    """DFlash2: the best ids of a slot are chosen among by the token before it.

    Args:
        rank: width of the codebooks, one row per target id.
        top_k: ids of the highest logits that stand for selection.
    """

    rank: PositiveInt
    top_k: PositiveInt


class BlockDraft(_Facts, frozen=True, kw_only=True):
    """What only some block drafts state.

    Args:
        is_causal: whether a slot sees the slots before it only (true) or all of them (false), in
            every layer; None: sliding layers are causal, full ones are not.
        convolution: DFlash2 only.
        selector: DFlash2 only.
    """

    is_causal: bool | None = None
    convolution: LocalConvolution | None = None
    selector: CandidateSelector | None = None


class PredictionLayers(_Facts, frozen=True, kw_only=True):
    """How the layers of an MTP draft are fed; the defaults are DeepSeek-V3's.

    Args:
        concat_order: halves of `fc.weight`'s columns.
        recycled_hidden: what a later step reads in place of the target's state: the layer's output
            after its last norm (`normed`) or before it (`raw`).
    """

    concat_order: Literal["embedding, hidden", "hidden, embedding"] = "embedding, hidden"
    recycled_hidden: Literal["normed", "raw"] = "normed"


class Draft(_Facts, frozen=True, kw_only=True):
    """Facts of the draft.

    Args:
        format: on-disk dialect it was read from; a label, `algorithm` and `tensors` decide.
        algorithm: proposer that runs it.
        source: as the target's.
        revision: as the target's.
        decoder: shape of the draft's own layers; `num_layers` counted from tensors.
        target_hidden_size: width of the target states it consumes.
        aux_layer_ids: 0-based, output of that layer, -1 = embedding output. None for MTP
            and EAGLE-1, which read the state after the final norm.
        aux_numbering: numbering the ids were read in, `boundary` (k = after k blocks) or `output`.
        has_norm_before_residual: eagle3: residual is hidden_norm(h) instead of h.
        has_norm_before_fc: eagle3: `input_norm` over the concatenated states before fc.
        has_fc_norm: eagle3.1: one norm per captured state before fc.
        has_norm_output: eagle3.1: norm(h) is fed to the next step instead of h.
        tensors: role -> tensor. Roles are the canonical names of docs/reference/formats.md.
        block: None for a chain, and for a block draft without any of these facts.
        prediction: None for the defaults, and for a draft without prediction layers.
    """

    format: str
    algorithm: DraftAlgorithm
    source: str
    revision: str | None
    architecture: str
    config_digest: str
    dtype: str
    decoder: Decoder
    target_hidden_size: PositiveInt
    aux_layer_ids: tuple[int, ...] | None
    aux_numbering: Literal["boundary", "output"] | None
    has_fc_bias: bool
    has_norm_before_residual: bool
    has_norm_before_fc: bool
    has_fc_norm: bool
    has_norm_output: bool
    mask_token_id: int | None
    markov: MarkovHead | None
    has_confidence_head: bool
    is_confidence_with_markov: bool
    tensors: dict[str, TensorRef]
    files: tuple[WeightFile, ...]
    block: BlockDraft | None = None
    prediction: PredictionLayers | None = None


class Geometry(_Facts, frozen=True, kw_only=True):
    """Widths of a round; see docs/explanation/geometry.md.

    Args:
        num_speculative_tokens: draft tokens verified in a round (gamma).
        draft_width: slots in one draft forward: 1 for a chain, gamma for P-EAGLE, gamma or
            gamma + 1 for a block.
        verify_width: positions in the target forward, gamma + 1.
        sample_from_anchor: block drafts: slot 0 is a trained prediction. None for a chain.
        draft_block_size: trained block of a block drafter. None for a chain.
    """

    num_speculative_tokens: NonNegativeInt
    draft_width: NonNegativeInt
    verify_width: PositiveInt
    sample_from_anchor: bool | None
    draft_block_size: int | None


class Vocabulary(_Facts, frozen=True, kw_only=True):
    """Which ids the draft can propose.

    Args:
        map_kind: `identity` (draft id == target id) or `reduced`.
        map_tensor: d2t in the draft (offsets), when it is the source of the map.
        map_digest: `sha256:` over the absolute target ids as little-endian int64, draft-id order.
        token_map_file: user-supplied map, same path rule as `source`.
        forced_ids: target ids the map was checked to contain (EOS, specials), ascending.
    """

    target_vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    map_kind: Literal["identity", "reduced"]
    map_tensor: TensorRef | None
    map_digest: str | None
    token_map_file: str | None
    token_map_digest: str | None
    forced_ids: tuple[int, ...]


class Sharing(_Facts, frozen=True, kw_only=True):
    """Where the draft's embedding and head come from.

    `own`: a tensor of the draft; `target`: the target module's loaded parameter;
    `checkpoint`: read from the target's files (a stage that does not hold the embedding).
    """

    embedding_single_stage: Literal["own", "target"]
    embedding_multi_stage: Literal["own", "checkpoint"]
    head: Literal["own", "target"]


class Parallel(_Facts, frozen=True, kw_only=True):
    """Bytes a stage split balances, and the tensor-parallel sizes that divide every dimension."""

    embedding_bytes: NonNegativeInt
    head_bytes: NonNegativeInt
    layer_bytes: tuple[int, ...]
    draft_bytes: NonNegativeInt
    tensor_parallel_sizes: tuple[int, ...]


class Graphs(_Facts, frozen=True, kw_only=True):
    """Batch sizes for which a round has its own fixed-shape key, and what rounds cost.

    Args:
        cost_table: file of measured costs that adaptive draft counts go by, relative to the
            manifest's directory or absolute; None: `<manifest>.costs.json` next to the manifest.
    """

    batch_buckets: tuple[int, ...]
    cost_table: str | None = None


class Sampling(_Facts, frozen=True, kw_only=True):
    """How drafts of sampled requests are decided about; greedy requests are exact in every mode.

    Args:
        verification: `seeded` keeps the tokens of target-only decoding, `rejection` their law.
    """

    verification: VerificationMode


class AcceptedDiagnostic(_Facts, frozen=True, kw_only=True):
    """A warning that was present when the manifest was written."""

    code: str
    where: str
    message: str


class Manifest(_Facts, frozen=True, kw_only=True):
    """A target, its draft (None: target only) and how they fit."""

    schema_version: PositiveInt
    specctl_version: str
    target: Target
    draft: Draft | None
    geometry: Geometry
    vocabulary: Vocabulary
    sharing: Sharing | None
    parallel: Parallel
    graphs: Graphs
    sampling: Sampling
    diagnostics: tuple[AcceptedDiagnostic, ...]
    fingerprint: str
    origins: dict[str, Origin]
