"""Families 3 and 4, continued: heads, facts that differ from the target's, tokenizers."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD328",
        slug="head-count-differs",
        severity="warning",
        summary="The config's number of heads differs from the heads in the file.",
        why="Loaders that build by the config drop the surplus heads or run random ones.",
        fix="Set the count to the number of heads in the file",
        source="FasterDecoding/medusa-vicuna-7b-v1.3 states 2 heads and holds 5",
    ),
    Code(
        code="SD329",
        slug="rope-differs-from-target",
        severity="info",
        summary="The draft turns its heads with other rotary numbers than the target.",
        why="Legal, but some engines share one cosine table between both models.",
        fix="Nothing to do here; check engines that share the table",
        source="vLLM Ascend issue 6612",
    ),
    Code(
        code="SD330",
        slug="target-architecture-differs",
        severity="warning",
        summary="A Speculators config names another target architecture than this target has.",
        why="Widths and vocabularies of two families can agree by chance; a draft of another "
        "family loads, answers rightly, and is never accepted.",
        fix="Use the target that `speculators_config.verifier` names, or correct the entry",
    ),
    Code(
        code="SD331",
        slug="aux-layers-look-shifted",
        severity="warning",
        summary="The captured layers are the usual ones of this target, each one layer off.",
        why="Some dialects count outputs of layers and some boundaries between them, and a list "
        "that was copied unconverted loads. The draft then reads other states than in training: "
        "the accept length falls and nothing fails.",
        fix="Write the list as this dialect counts, or say how it counts: `specctl manifest ... "
        "--aux-numbering output`. Nothing to do when the draft was trained on these layers",
        source="speculators issue 753; vLLM pull request 40727",
    ),
    Code(
        code="SD332",
        slug="norm-epsilon-differs-from-target",
        severity="info",
        summary="The draft's norms add another epsilon than the target's.",
        why="Drafts are trained with their target's, as a rule; an absent `rms_norm_eps` is 1e-6 "
        "in every class, and rows of small numbers, such as embeddings, feel the difference. One "
        "of a thousandth or more is no epsilon of a model, and a warning.",
        fix="State the `rms_norm_eps` of the training run",
        source="transformers 5.24 `LlamaConfig`, `Qwen3Config`",
    ),
    Code(
        code="SD333",
        slug="mask-token-is-text",
        severity="warning",
        summary="The mask token of a block draft stands for text in the target's tokenizer.",
        why="Drafts are trained with a special token, or a row that no token has, in the slots "
        "that they fill. Another one loads and shows as an accept length near 1: SmolLM2's DSpark "
        "draft falls from 1.83 to 1.08 with the id beside its own.",
        fix="State the `mask_token_id` of the training run. Nothing to do when it was this token",
    ),
    Code(
        code="SD416",
        slug="map-reaches-padding",
        severity="warning",
        summary="Entries of the draft's map are padding rows above the tokenizer's last token.",
        why="Such an id is no token: proposing it can only be rejected, or gives text that cannot "
        "be decoded where padding rows of the target are not masked.",
        fix="Rebuild the map from this target's tokenizer",
        source="vLLM issue 13849",
    ),
    Code(
        code="SD417",
        slug="mask-vector-beside",
        severity="info",
        summary="The mask vector lies in a file of its own beside the weights.",
        why="A loader that reads the weights only feeds an unset row to every slot.",
        fix="Copy the file with the checkpoint; check that the engine reads it",
        source="vLLM issue 46104",
    ),
    Code(
        code="SD418",
        slug="tie-flag-contradicts",
        severity="warning",
        summary="`tie_word_embeddings` has two values at two levels of the config, or is true of a "
        "draft that stores a head of its own.",
        why="transformers takes the outer one, other readers the inner one; and a reader that "
        "honours the flag replaces the stored head by the embedding.",
        fix="State the flag once, as the files have it",
    ),
    Code(
        code="SD419",
        slug="tokenizer-differs",
        severity="error",
        summary="Draft and target come with tokenizers that give one id to different tokens.",
        why="Ids mean other text on each side, so nothing the draft proposes is what it means.",
        fix="Use the target that the draft was trained for",
        source="vLLM issues 13849 and 7252",
    ),
)
