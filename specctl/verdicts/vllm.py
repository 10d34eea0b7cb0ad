"""vLLM: rules read in the sources of its releases.

*Source:* `vllm/transformers_utils/configs/speculators/algos.py` and `base.py`,
`vllm/model_executor/models/{llama_eagle,llama_eagle3,qwen3_dflash,qwen3_dspark}.py`,
`vllm/v1/worker/gpu/spec_decode/eagle/utils.py`, of each release named in a row.
"""

from __future__ import annotations

from specctl.verdicts.facts import (
    has_qkv_bias,
    is_eagle3,
    is_flat,
    is_plain_in_quantized,
    lacks_head,
    lacks_map,
    stores_absolute_map,
)
from specctl.verdicts.rule import Facts, Rule

_ALGOS = "vllm/transformers_utils/configs/speculators/algos.py"
_EAGLE3 = "vllm/model_executor/models/llama_eagle3.py"
_ALL = "0.24.0 to 0.33.0"
_WITHOUT_MTP = ("llama", "mistral", "qwen2", "qwen3")


def _type(*names: str) -> frozenset[str]:
    return frozenset(names)


def _is_type(facts: Facts, names: frozenset[str]) -> bool:
    kind = facts.top("speculators_model_type")
    return isinstance(kind, str) and kind in names


def _layer_type(facts: Facts) -> object:
    return facts.nested("transformer_layer_config", "model_type")


def _is_speculators_dspark(facts: Facts) -> bool:
    return _is_type(facts, _type("dspark"))


VLLM_RULES: tuple[Rule, ...] = (
    Rule(
        name="vllm-speculators-type",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: _is_type(f, _type("eagle", "mtp", "xpress")),
        reason="the Speculators type is not registered; an MTP draft is stitched into its target "
        "and served with method mtp instead",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-speculators-dspark-early",
        engine="vllm",
        outcome="refused",
        versions="0.24.0",
        is_current=False,
        applies=_is_speculators_dspark,
        reason="the Speculators type dspark is not registered yet",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-speculators-dflash2-early",
        engine="vllm",
        outcome="refused",
        versions="0.24.0 to 0.28.0",
        is_current=False,
        applies=lambda f: _is_type(f, _type("dflash2")),
        reason="the Speculators type dflash2 is not registered yet",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-speculators-model-type",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.is_speculators and f.top("model_type") not in (None, "speculators"),
        reason="a Speculators config with a top-level `model_type` is read as that model, not as a "
        "draft",
        source="vllm/transformers_utils/config.py",
    ),
    Rule(
        name="vllm-eagle3-layer-type",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            _is_type(f, _type("eagle3", "peagle"))
            and _layer_type(f) not in (None, "llama", "qwen3")
        ),
        reason="only llama and qwen3 layers have an EAGLE-3 class",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-norm-before-residual-absent",
        engine="vllm",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: _is_type(f, _type("eagle3")) and f.top("norm_before_residual") is None,
        reason="an absent `norm_before_residual` is read as true; the library that wrote the file "
        "reads false",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-eagle31-flags-early",
        engine="vllm",
        outcome="wrong",
        versions="0.24.0",
        is_current=False,
        applies=lambda f: (
            _is_type(f, _type("eagle3")) and (f.draft.has_norm_output or f.draft.has_fc_norm)
        ),
        reason="`norm_output` and `fc_norm` of a Speculators config are not passed to the model",
        source="vLLM pull request 46488",
    ),
    Rule(
        name="vllm-peagle-norm-output",
        engine="vllm",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            _is_type(f, _type("peagle")) and (f.draft.has_norm_output or f.draft.has_fc_norm)
        ),
        reason="`norm_output` and `fc_norm` of a peagle config are not passed to the model",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-parallel-mask-missing",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            _is_type(f, _type("peagle", "dflash", "dflash2")) and f.top("mask_token_id") is None
        ),
        reason="`mask_token_id` is required for parallel drafting",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-block-layers-missing",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            _is_type(f, _type("dflash", "dflash2", "dspark"))
            and f.top("aux_hidden_state_layer_ids") is None
        ),
        reason="`aux_hidden_state_layer_ids` is required",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-map-missing",
        engine="vllm",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: lacks_map(f) and f.draft.algorithm != "dspark",
        reason="without a map every draft id is taken for the target id of the same number",
        source="vLLM issue 18909; NeMo Automodel issue 2447",
    ),
    Rule(
        name="vllm-head-missing",
        engine="vllm",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: lacks_head(f) and f.draft.algorithm != "dspark",
        reason="the target's whole head is put in place of the reduced one",
        source="vllm/v1/worker/gpu/spec_decode/eagle/utils.py; vllm-ascend pull request 9795",
    ),
    Rule(
        name="vllm-dspark-reduced-incomplete",
        engine="vllm",
        outcome="refused",
        versions="0.26.0 to 0.33.0",
        is_current=True,
        applies=lambda f: f.draft.algorithm == "dspark" and (lacks_head(f) or lacks_map(f)),
        reason="a reduced vocabulary needs both `lm_head` and `d2t`",
        source="vllm/model_executor/models/qwen3_dspark.py",
    ),
    Rule(
        name="vllm-absolute-map",
        engine="vllm",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=stores_absolute_map,
        reason="the map is read as offsets and holds absolute ids",
        source=_EAGLE3,
    ),
    Rule(
        name="vllm-draft-vocab-absent",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            f.is_reduced
            and f.draft.algorithm in ("eagle3", "peagle")
            and f.top("draft_vocab_size") is None
        ),
        reason="an absent `draft_vocab_size` means the whole vocabulary, and the head does not fit",
        source=_EAGLE3,
    ),
    Rule(
        name="vllm-dspark-anchor-fixed",
        engine="vllm",
        outcome="wrong",
        versions="0.26.0",
        is_current=False,
        applies=lambda f: _is_speculators_dspark(f) and f.draft.sample_from_anchor is True,
        reason="`sample_from_anchor` is not read; every block is run with its anchor discarded",
        source="vLLM pull request 48639",
    ),
    Rule(
        name="vllm-dspark-anchor-absent",
        engine="vllm",
        outcome="wrong",
        versions="0.28.0 to 0.33.0",
        is_current=True,
        applies=lambda f: (
            _is_speculators_dspark(f)
            and f.top("sample_from_anchor") is None
            and f.draft.sample_from_anchor is True
        ),
        reason="an absent `sample_from_anchor` is read as false; the library's default is true",
        source=f"{_ALGOS}; vLLM issue 56792",
    ),
    Rule(
        name="vllm-dspark-taps-by-layers",
        engine="vllm",
        outcome="refused",
        versions="0.26.0",
        is_current=False,
        applies=lambda f: (
            _is_speculators_dspark(f)
            and f.draft.decoder is not None
            and f.draft.num_aux_states not in (None, f.draft.decoder.num_layers)
        ),
        reason="`fc` is sized by the draft's layers instead of the captured states",
        source="vllm/model_executor/models/qwen3_dflash.py; observed with a trained draft",
    ),
    Rule(
        name="vllm-dspark-markov-kind",
        engine="vllm",
        outcome="refused",
        versions="0.26.0 to 0.33.0",
        is_current=True,
        applies=lambda f: f.draft.markov is not None and f.draft.markov.kind != "vanilla",
        reason="only the vanilla Markov head exists; the others' tensors have no place",
        source="vllm/model_executor/models/qwen3_dspark.py",
    ),
    Rule(
        name="vllm-dflash-taps-absent",
        engine="vllm",
        outcome="wrong",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            is_flat(f)
            and f.draft.algorithm in ("dflash", "dflash2")
            and f.draft.declared_aux_ids is None
        ),
        reason="without `target_layer_ids` as many states as draft layers are captured, by rule",
        source="vllm/model_executor/models/qwen3_dflash.py",
    ),
    Rule(
        name="vllm-dflash-window-causality",
        engine="vllm",
        outcome="wrong",
        versions="0.26.0 to 0.33.0",
        is_current=True,
        applies=lambda f: (
            _is_type(f, _type("dflash", "dflash2"))
            and f.top("sliding_window_non_causal") is None
            and f.draft.decoder is not None
            and f.draft.decoder.sliding_window is not None
        ),
        reason="an absent `sliding_window_non_causal` is read as true; the library's default is "
        "false",
        source=_ALGOS,
    ),
    Rule(
        name="vllm-eagle-bias",
        engine="vllm",
        outcome="refused",
        versions="0.33.0",
        is_current=True,
        applies=lambda f: f.draft.algorithm == "eagle" and f.draft.has_fc_bias,
        reason="`fc` is built without a bias and a stored one has no place",
        source="vllm/model_executor/models/llama_eagle.py; vLLM issue 9565",
    ),
    Rule(
        name="vllm-eagle3-bias-denied",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f)
            and has_qkv_bias(f)
            and not (
                f.top("attention_bias") or f.nested("transformer_layer_config", "attention_bias")
            )
        ),
        reason="projection biases exist only when `attention_bias` is true",
        source=_EAGLE3,
    ),
    Rule(
        name="vllm-mtp-quantized-config",
        engine="vllm",
        outcome="refused",
        versions="before pull request 43319",
        is_current=False,
        applies=is_plain_in_quantized,
        reason="the prediction layers are built with the target's quantization and stored plain",
        source="vLLM issues 43304 and 47792",
    ),
    Rule(
        name="vllm-mtp-no-class",
        engine="vllm",
        outcome="refused",
        versions="main at 002e77c1 (2026)",
        is_current=True,
        applies=lambda f: f.draft.algorithm == "mtp" and f.top("model_type") in _WITHOUT_MTP,
        reason="no class holds prediction layers of the dense llama, mistral, qwen2 and qwen3 "
        "families",
        source="vllm/config/speculative.py hf_config_override",
    ),
    Rule(
        name="vllm-medusa-removed",
        engine="vllm",
        outcome="refused",
        versions="0.33.0",
        is_current=True,
        applies=lambda f: f.draft.algorithm in ("medusa", "mlp_speculator"),
        reason="the model classes of Medusa and MLPSpeculator are gone",
        source="vllm/model_executor/models (medusa.py and mlp_speculator.py until 0.30.0)",
    ),
    Rule(
        name="vllm-no-class",
        engine="vllm",
        outcome="refused",
        versions=_ALL,
        is_current=True,
        applies=lambda f: f.draft.algorithm in ("hydra", "domino"),
        reason="no model class reads this draft",
        source="vllm/model_executor/models/registry.py",
    ),
)
