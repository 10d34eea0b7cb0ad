"""Family 3: geometry of a round, captured layers, widths of the layers."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD301",
        slug="gamma-missing",
        severity="info",
        summary="The checkpoint does not say how many tokens to draft in a round.",
        why="The format has no such field; the best value depends on target, hardware and batch.",
        fix="Give it when the manifest is written: `--num-speculative-tokens N` (3 to 5 is usual)",
    ),
    Code(
        code="SD302",
        slug="anchor-width-mismatch",
        severity="error",
        summary="The token count does not follow from the block size and `sample_from_anchor`.",
        why="A wrong width does not crash; it shifts every slot and pulls accept length toward 1.",
        fix="Set `sample_from_anchor` or the token count so that they agree with training",
        source="Speculators dspark: true means block_size tokens, false block_size - 1",
    ),
    Code(
        code="SD303",
        slug="aux-layer-convention-unknown",
        severity="error",
        summary="The captured-layer ids may count layers or boundaries, and nothing decides which.",
        why="The two readings capture states one layer apart: acceptance drops by a few percent "
        "and nothing fails.",
        fix="State it: `--aux-layer-ids ... --aux-numbering output` (or `boundary`)",
        source="SGLang pull request 25454; SpecForge and ModelOpt write outputs, others boundaries",
    ),
    Code(
        code="SD304",
        slug="aux-layer-out-of-range",
        severity="error",
        summary="A captured-layer id lies outside the target's layers.",
        why="The state does not exist in this target; the draft belongs to a deeper one.",
        fix="Use the target that the draft was trained for, or correct the ids and their numbering",
    ),
    Code(
        code="SD305",
        slug="hidden-size-mismatch",
        severity="error",
        summary="The draft expects target states of another width than this target has.",
        why="The draft belongs to another target.",
        fix="Use the target that the draft was trained for",
    ),
    Code(
        code="SD306",
        slug="aux-layers-open",
        severity="info",
        summary="The captured layers follow from the target's layer count; no target was given.",
        why="The format's rule is [2, n//2, n-3] in boundary numbering for a target of n layers.",
        fix="Give the target (`--target SOURCE`) or the ids (`--aux-layer-ids`)",
        source="SafeAILab EAGLE-3; Speculators eagle3 with a null list",
    ),
    Code(
        code="SD307",
        slug="anchor-unstated",
        severity="warning",
        summary="A DSpark config lacks `sample_from_anchor`.",
        why="The library's default is true, but early files were trained with a conditioning "
        "anchor (false) and leave the field out.",
        fix="Add `sample_from_anchor` to config.json: false when the draft was trained to predict "
        "block_size - 1 tokens",
    ),
    Code(
        code="SD308",
        slug="aux-layers-not-increasing",
        severity="error",
        summary="The captured-layer ids repeat or are not in ascending order.",
        why="Engines capture in layer order, so the columns of `fc` would meet the wrong states.",
        fix="List the ids in ascending order, as trained",
    ),
    Code(
        code="SD309",
        slug="head-dim-inferred",
        severity="warning",
        summary="`head_dim` is absent and the q projection shows another value than "
        "hidden_size / num_attention_heads.",
        why="Readers that divide get the wrong size and stop with a shape error.",
        fix="Add `head_dim` to config.json",
        source="EAGLE issue 315 and pull request 342",
    ),
    Code(
        code="SD310",
        slug="layer-count-differs",
        severity="warning",
        summary="The config's layer count differs from the layers in the file.",
        why="Some tools build as many layers as the config says, the rest at random values.",
        fix="Set the count to the number of layers in the file",
        source="BaldEagle issue 6: EAGLE3-Vicuna1.3-13B says 40",
    ),
    Code(
        code="SD311",
        slug="norm-before-residual-unstated",
        severity="warning",
        summary="A Speculators eagle3 config lacks `norm_before_residual`.",
        why="The library takes false and vLLM takes true, so the draft computes different things.",
        fix="Add `norm_before_residual` with the value used in training",
    ),
    Code(
        code="SD312",
        slug="final-state-captured",
        severity="info",
        summary="The draft captures the state after the last layer, before the final norm.",
        why="Legal, but engines that capture before a layer runs never reach it.",
        fix="Nothing to do here; check other engines for this draft",
        source="SGLang pull request 32334",
    ),
    Code(
        code="SD313",
        slug="confidence-needs-markov",
        severity="error",
        summary="`confidence_head_with_markov` is true without a Markov head.",
        why="The confidence head's input includes the Markov embedding, which does not exist.",
        fix="Set `confidence_head_with_markov` to false, or restore `markov_rank`",
    ),
    Code(
        code="SD314",
        slug="mask-token-invalid",
        severity="error",
        summary="A block draft has no mask token, or one outside the embedding.",
        why="Every slot after the anchor is fed this token.",
        fix="Set `mask_token_id` to the id used in training",
    ),
    Code(
        code="SD315",
        slug="position-limit-shorter",
        severity="warning",
        summary="The draft's position limit is below the target's.",
        why="Past the draft's limit it was never trained; acceptance falls or drafting stops.",
        fix="Expect plain decoding beyond the limit, or raise `max_position_embeddings` if the "
        "draft was trained longer",
        source="NeMo RL pull request 3960",
    ),
    Code(
        code="SD316",
        slug="norm-output-meaning-unknown",
        severity="warning",
        summary="`norm_output` is true in a config whose writer changed what it means.",
        why="Before pull request 879 SpecForge fed the raw state back under this flag; everyone "
        "else feeds the normed state. Only the trainer's date tells.",
        fix="Ask for the trainer's version, then state the flag as the other engines mean it",
        source="SpecForge pull request 879",
    ),
    Code(
        code="SD317",
        slug="target-depth-mismatch",
        severity="error",
        summary="The draft was cut from, or made for, a target with another number of layers.",
        why="An MTP layer is numbered after the target's last layer; another number means another "
        "target.",
        fix="Use the target that the draft was trained for",
    ),
)
