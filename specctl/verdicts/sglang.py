"""SGLang: rules read in the sources of its releases.

*Source:* `sglang/srt/models/{llama_eagle,llama_eagle3,dspark,dflash,deepseek_nextn}.py`,
`sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py`,
`sglang/srt/speculative/{dflash_utils,dspark_components/dspark_config}.py`.
"""

from __future__ import annotations

from specctl.formats.aux_layers import AUX_KEY, default_boundaries
from specctl.verdicts.facts import (
    has_qk_norm,
    has_qkv_bias,
    is_eagle3,
    is_flat,
    is_plain_in_quantized,
    lacks_map,
    names_architecture,
    stores_absolute_map,
)
from specctl.verdicts.rule import Facts, Rule

_EAGLE3 = "sglang/srt/models/llama_eagle3.py"
_AUX = "sglang/srt/model_executor/model_runner_components/spec_aux_hidden_state.py"
_DSPARK = "sglang/srt/models/dspark.py"
_ALL = "0.5.16 to 0.5.23"
_BASE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _takes_default_layers(facts: Facts) -> bool:
    """The list is at the top level, which is not read, and is not the default one."""
    listed = facts.top(AUX_KEY)
    if not is_eagle3(facts) or facts.is_speculators or listed is None:
        return False
    if isinstance(facts.nested("eagle_config", AUX_KEY), list):
        return False
    layers = facts.target_num_layers
    return layers is None or listed != [k - 1 for k in default_boundaries(layers)]


def _captures_outside(facts: Facts) -> bool:
    """An output id is the embedding's or the last layer's, which no layer's entry holds."""
    ids, layers = facts.draft.aux_layer_ids, facts.target_num_layers
    if ids is None or facts.is_speculators:
        return False
    return min(ids) < 0 or (layers is not None and max(ids) >= layers - 1)


def _mtp_count(facts: Facts) -> object:
    return facts.top("num_nextn_predict_layers")


SGLANG_RULES: tuple[Rule, ...] = (
    Rule(
        name="sglang-speculators",
        engine="sglang",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.is_speculators,
        reason="nested Speculators configs are not read; convert the draft to a flat dialect",
        source="no use of transformer_layer_config in the sources; speculators issue 753",
    ),
    Rule(
        name="sglang-base-architecture",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            is_flat(f)
            and f.draft.algorithm in ("eagle", "eagle3")
            and names_architecture(f, *_BASE_ARCHITECTURES)
        ),
        reason="the architecture names the base model's class, which finds none of the tensors",
        source="SGLang issue 33966",
    ),
    Rule(
        name="sglang-norm-before-residual",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_eagle3(f) and f.draft.has_norm_before_residual,
        reason="`norm_before_residual` is not implemented; the raw state is always the residual",
        source=_EAGLE3,
    ),
    Rule(
        name="sglang-norm-before-fc-early",
        engine="sglang",
        outcome="wrong",
        versions="0.5.16",
        is_current=False,
        applies=lambda f: is_eagle3(f) and f.draft.has_norm_before_fc,
        reason="`norm_before_fc` is not implemented yet and `input_norm` is dropped",
        source=_EAGLE3,
    ),
    Rule(
        name="sglang-layer-parts-dropped",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_eagle3(f) and (has_qk_norm(f) or has_qkv_bias(f)),
        reason="query and key norms and projection biases have no place and are dropped silently",
        source=_EAGLE3,
    ),
    Rule(
        name="sglang-own-embedding",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f) and f.draft.has_own_embedding and f.top("embed_requires_grad") is True
        ),
        reason="a trained embedding is overwritten by the target's",
        source="sglang/srt/speculative/eagle_worker.py set_embed",
    ),
    Rule(
        name="sglang-aux-layers-top-level",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=_takes_default_layers,
        reason=f"`{AUX_KEY}` is read inside `eagle_config` only; the default layers are captured",
        source=_AUX,
    ),
    Rule(
        name="sglang-draft-vocab-absent",
        engine="sglang",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_eagle3(f) and is_flat(f) and "draft_vocab_size" not in f.draft.config,
        reason="`draft_vocab_size` is read without a default",
        source=f"{_EAGLE3}; EAGLE issue 214",
    ),
    Rule(
        name="sglang-head-missing",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f)
            and is_flat(f)
            and "head" not in f.draft.tensors
            and f.top("draft_vocab_size") is not None
        ),
        reason="a head is built because `draft_vocab_size` is set, and stays random",
        source="SGLang issue 27829",
    ),
    Rule(
        name="sglang-map-missing",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_eagle3(f) and lacks_map(f),
        reason="without a map every draft id is taken for the target id of the same number",
        source="NeMo Automodel issue 2447",
    ),
    Rule(
        name="sglang-absolute-map",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=stores_absolute_map,
        reason="the map is read as offsets and holds absolute ids",
        source=f"{_EAGLE3}; verl SpeCo issue 67",
    ),
    Rule(
        name="sglang-unknown-tensors",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_eagle3(f) and is_flat(f) and bool(f.draft.unmapped),
        reason="tensors without a parameter of their name are dropped silently",
        source=_EAGLE3,
    ),
    Rule(
        name="sglang-missing-tensors",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f) and is_flat(f) and any(d.code == "SD501" for d in f.draft.diagnostics)
        ),
        reason="a parameter that the file does not fill keeps its random start, without a word",
        source=f"{_EAGLE3}; SGLang issue 27829",
    ),
    Rule(
        name="sglang-peagle",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_flat(f) and f.draft.algorithm == "peagle",
        reason="parallel drafting of EAGLE is not implemented; `mask_hidden` is dropped",
        source="no use of mask_hidden in the sources",
    ),
    Rule(
        name="sglang-eagle-bias-missing",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: is_flat(f) and f.draft.algorithm == "eagle" and not f.draft.has_fc_bias,
        reason="`fc` is built with a bias, which the file does not fill",
        source="sglang/srt/models/llama_eagle.py",
    ),
    Rule(
        name="sglang-dspark-anchor-early",
        engine="sglang",
        outcome="wrong",
        versions="0.5.16",
        is_current=False,
        applies=lambda f: (
            is_flat(f) and f.draft.algorithm == "dspark" and f.draft.sample_from_anchor is False
        ),
        reason="`sample_from_anchor` is not read; every slot is taken one early",
        source="SGLang issue 30982",
    ),
    Rule(
        name="sglang-dspark-anchor-absent",
        engine="sglang",
        outcome="wrong",
        versions="0.5.23",
        is_current=True,
        applies=lambda f: (
            is_flat(f)
            and f.draft.algorithm == "dspark"
            and f.top("sample_from_anchor") is None
            and f.draft.sample_from_anchor is False
        ),
        reason="`sample_from_anchor` is read at the top level only and is true when absent there",
        source="sglang/srt/speculative/dspark_components/dspark_config.py",
    ),
    Rule(
        name="sglang-dspark-markov-rank",
        engine="sglang",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.draft.algorithm == "dspark" and is_flat(f) and f.draft.markov is None,
        reason="a DSpark draft must have a Markov rank above 0",
        source="sglang/srt/speculative/dspark_components/dspark_config.py",
    ),
    Rule(
        name="sglang-dspark-reduced-head",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.draft.algorithm == "dspark" and is_flat(f) and f.is_reduced,
        reason="a stored `lm_head` is skipped and the target's whole head is used",
        source=f"{_DSPARK}; SGLang pull request 34734",
    ),
    Rule(
        name="sglang-aux-layer-not-captured",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=_captures_outside,
        reason="states are taken at the entry of the next layer, so the embedding's and the last "
        "layer's output are out of reach",
        source="NeMo Automodel issue 3082; SGLang issue 32204",
    ),
    Rule(
        name="sglang-block-vocabulary",
        engine="sglang",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            f.draft.algorithm in ("dflash", "dflash2") and is_flat(f) and f.is_reduced
        ),
        reason="a reduced head is dropped and the target's whole head is used",
        source="sglang/srt/models/dflash.py",
    ),
    Rule(
        name="sglang-dflash2-early",
        engine="sglang",
        outcome="refused",
        versions="0.5.16",
        is_current=False,
        applies=lambda f: f.draft.algorithm == "dflash2",
        reason="DFlash2DraftModel is not registered yet",
        source="sglang/srt/models/dflash.py",
    ),
    Rule(
        name="sglang-domino-early",
        engine="sglang",
        outcome="wrong",
        versions="0.5.16",
        is_current=False,
        applies=lambda f: f.draft.algorithm == "domino",
        reason="the projector type domino is not known yet and its heads are dropped",
        source="sglang/srt/speculative/dflash_utils.py",
    ),
    Rule(
        name="sglang-mtp-count",
        engine="sglang",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.draft.format == "deepseek-mtp" and _mtp_count(f) != 1,
        reason="`num_nextn_predict_layers` must be stated and 1",
        source="sglang/srt/models/deepseek_common/deepseek_weight_loader.py",
    ),
    Rule(
        name="sglang-mtp-quantized-config",
        engine="sglang",
        outcome="refused",
        versions="reported until 0.5.16",
        is_current=False,
        applies=is_plain_in_quantized,
        reason="the prediction layers are built with the target's quantization unless the config's "
        "ignore list names them",
        source="SGLang issues 34906, 38574 and 40002",
    ),
    Rule(
        name="sglang-no-algorithm",
        engine="sglang",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.draft.algorithm in ("medusa", "hydra", "mlp_speculator", "xpress"),
        reason="no algorithm of the engine runs this draft",
        source="sglang/srt/speculative/spec_info.py",
    ),
)
