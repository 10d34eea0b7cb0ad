"""TensorRT-LLM, PyTorch backend: rules read in its sources.

*Source:* `tensorrt_llm/_torch/models/modeling_speculative.py` (`Eagle3ForCausalLM`).
"""

from __future__ import annotations

from specctl.verdicts.facts import (
    has_qk_norm,
    is_eagle3,
    is_flat,
    lacks_head,
    lacks_map,
    stores_absolute_map,
)
from specctl.verdicts.rule import Rule

_MODEL = "tensorrt_llm/_torch/models/modeling_speculative.py"
_MAIN = "main at 00679c66"

TENSORRT_LLM_RULES: tuple[Rule, ...] = (
    Rule(
        name="tensorrt-llm-speculators",
        engine="tensorrt-llm",
        outcome="refused",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: f.is_speculators,
        reason="nested Speculators configs name no registered model",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-norm-before-residual",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: is_eagle3(f) and f.draft.has_norm_before_residual,
        reason="`norm_before_residual` is not implemented; the raw state is always the residual",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-norm-before-fc",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f)
            and is_flat(f)
            and f.draft.has_norm_before_fc
            and f.nested("eagle_config", "norm_before_fc") is not True
        ),
        reason="`norm_before_fc` is read inside `eagle_config` only; the stored norm is not used",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-qk-norm",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: is_eagle3(f) and has_qk_norm(f),
        reason="query and key norms have no place in the draft layer",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-own-embedding",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f)
            and f.draft.has_own_embedding
            and f.top("embed_requires_grad") is True
            and f.draft.hidden_size == f.draft.target_hidden_size
        ),
        reason="a trained embedding of the target's width is not used; the target's is",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-head-missing",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: f.draft.algorithm == "eagle3" and lacks_head(f),
        reason="the target's whole head is put in place of the reduced one",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-map-missing",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: f.draft.algorithm == "eagle3" and lacks_map(f),
        reason="the map parameter is created uninitialised and not filled",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-absolute-map",
        engine="tensorrt-llm",
        outcome="wrong",
        versions=_MAIN,
        is_current=True,
        applies=stores_absolute_map,
        reason="the map is read as offsets and holds absolute ids",
        source=_MODEL,
    ),
    Rule(
        name="tensorrt-llm-draft-vocab-absent",
        engine="tensorrt-llm",
        outcome="refused",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: (
            is_eagle3(f) and f.is_reduced and is_flat(f) and f.top("draft_vocab_size") is None
        ),
        reason="an absent `draft_vocab_size` means the whole vocabulary, and the head does not fit",
        source="TensorRT-LLM pull request 10124",
    ),
    Rule(
        name="tensorrt-llm-eagle-bias-missing",
        engine="tensorrt-llm",
        outcome="refused",
        versions="engine builder of 0.16",
        is_current=False,
        applies=lambda f: f.draft.algorithm == "eagle" and not f.draft.has_fc_bias,
        reason="the converter of the TensorRT backend asks for `fc.bias`",
        source="TensorRT-LLM issue 2588",
    ),
    Rule(
        name="tensorrt-llm-no-class",
        engine="tensorrt-llm",
        outcome="refused",
        versions=_MAIN,
        is_current=True,
        applies=lambda f: f.draft.algorithm in ("peagle", "hydra", "mlp_speculator", "xpress"),
        reason="no model class reads this draft",
        source=_MODEL,
    ),
)
