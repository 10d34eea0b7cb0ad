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
    Code(
        code="SD318",
        slug="fc-bias-unstated",
        severity="warning",
        summary="An EAGLE-1 config lacks `bias`, and no bias of `fc` is stored.",
        why="The reference reads an absent `bias` as true and then runs with a bias that was never "
        "trained.",
        fix="Add `bias`: false to config.json",
        source="SafeAILab/EAGLE cnets1.py; vLLM pull request 12831",
    ),
    Code(
        code="SD325",
        slug="experts-incomplete",
        severity="error",
        summary="The experts of a prediction layer are not numbered from 0 on without a gap.",
        why="Loaders stack experts by number; with a gap the stack is short or holds random rows.",
        fix="Export the layer again and check that every expert has its three matrices",
        source="Speculators 0.9 refuses such a file when it fuses experts",
    ),
    Code(
        code="SD326",
        slug="prediction-layers-unannounced",
        severity="warning",
        summary="Prediction layers are stored and the config's count of them is 0 or absent.",
        why="Engines decide by the count: they pass the tensors over and draft nothing.",
        fix="Set the count to the number of layers stored",
        source="vLLM reads num_nextn_predict_layers or mtp_num_hidden_layers",
    ),
    Code(
        code="SD327",
        slug="prediction-layers-absent",
        severity="warning",
        summary="The config promises prediction layers and no tensor of theirs is stored.",
        why="An engine that follows the config runs random layers, or stops; acceptance is 0. The "
        "target itself is complete.",
        fix="Fetch the file with the layers, or set the count to 0",
        source="MiniMax-M2 issue 47; SGLang issue 17166",
    ),
    Code(
        code="SD320",
        slug="vocabulary-must-be-full",
        severity="error",
        summary="A DFlash2 draft has a reduced vocabulary.",
        why="The candidate selector's codebooks are indexed by target ids and no map is applied to "
        "what it selects, so a reduced head would propose other tokens than it scores.",
        fix="Use the full vocabulary: `draft_vocab_size` equal to `vocab_size`, no map",
        source="Speculators 0.9 DFlash2DraftModel; z-lab/dflash CandidateSelector",
    ),
    Code(
        code="SD321",
        slug="anchor-never-sampled",
        severity="error",
        summary="A DFlash2 config says that slot 0 is a prediction.",
        why="The selector starts from the anchor's own id; slot 0 has no candidate of its own, and "
        "every engine drops it.",
        fix="Set `sample_from_anchor` to false",
        source="Speculators 0.9 dflash2; z-lab/dflash `dflash_generate`",
    ),
    Code(
        code="SD322",
        slug="mask-vector-wrong",
        severity="error",
        summary="The file of the mask vector holds no vector, one of another length, or that of "
        "another token.",
        why="Every slot after the anchor is fed this vector. Engines stop at a file that does not "
        "fit, or feed the slots something that the draft was not trained with.",
        fix="Copy `mask_embedding.pt` from the same training run as the weights",
        source="vLLM issue 46104",
    ),
    Code(
        code="SD323",
        slug="convolution-does-not-fit",
        severity="error",
        summary="DFlash2's convolutions reach past the block, or their groups do not divide the "
        "hidden size.",
        why="The kernels cannot be laid over the channels or slots that they are said to cover.",
        fix="Correct `conv_kernel_size` or `conv_group_size` to the values used in training",
        source="z-lab/dflash GroupedDynamicCausalConv",
    ),
    Code(
        code="SD324",
        slug="aux-layers-by-rule",
        severity="warning",
        summary="A DFlash config names no captured layers; the class would compute them.",
        why="The rule spreads one layer for each draft layer evenly over the target. Published "
        "drafts were trained on other lists, and readers round differently.",
        fix="Add `dflash_config.target_layer_ids` with the layers used in training",
        source="z-lab/dflash `build_target_layer_ids`; z-lab/dflash issue 156",
    ),
)
