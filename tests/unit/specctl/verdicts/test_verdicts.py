"""Every rule of the engine table: a fixture that meets it, and clean drafts that do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from specctl import formats
from specctl.draft import DraftCheckpoint
from specctl.formats import complete_draft
from specctl.ops.engines import ENGINE_NAMES
from specctl.ops.validate import validate
from specctl.verdicts import ENGINES, RULES, Rule, judge
from tests.unit.specctl.formats.edits import CHECKPOINTS, DELETE, opened, target

EAGLE3 = "speculators-eagle3-clean"
DSPARK = "speculators-dspark-clean"
SPECFORGE = "specforge-eagle3-clean"
FROM_DECODER = "transformer_layer_config."
Case = tuple[str, Mapping[str, object], Mapping[str, object]]


def case(name: str, config: Mapping[str, object] | None = None, **edits: object) -> Case:
    """Return a fixture, dotted config edits and tensor edits (`drop`, `add`)."""
    return name, config or {}, edits


# rule -> a draft that meets it. Where no fixture has the defect alone, a clean one is edited.
CASES: dict[str, Case] = {
    "vllm-speculators-type": case("speculators-mtp-clean"),
    "vllm-speculators-dspark-early": case(DSPARK),
    "vllm-speculators-dflash2-early": case("speculators-dflash2-clean"),
    "vllm-speculators-model-type": case(EAGLE3, {"model_type": "llama"}),
    "vllm-eagle3-layer-type": case(EAGLE3, {FROM_DECODER + "model_type": "mistral"}),
    "vllm-norm-before-residual-absent": case("speculators-eagle3-norm-unstated"),
    "vllm-eagle31-flags-early": case("speculators-eagle3-state-norms"),
    "vllm-peagle-norm-output": case("speculators-peagle-clean", {"norm_output": True}),
    "vllm-parallel-mask-missing": case("speculators-dflash-clean", {"mask_token_id": DELETE}),
    "vllm-block-layers-missing": case("speculators-dspark-layers-missing"),
    "vllm-map-missing": case("speculators-eagle3-map-missing"),
    "vllm-head-missing": case(EAGLE3, drop=("lm_head.weight",)),
    "vllm-dspark-reduced-incomplete": case(DSPARK, drop=("lm_head.weight",)),
    "vllm-absolute-map": case("speculators-eagle3-map-absolute"),
    "vllm-draft-vocab-absent": case("speculators-eagle3-size-inferred"),
    "vllm-dspark-anchor-fixed": case(DSPARK),
    "vllm-dspark-anchor-absent": case(DSPARK, {"sample_from_anchor": DELETE}),
    "vllm-dspark-taps-by-layers": case(DSPARK),
    "vllm-dspark-markov-kind": case("speculators-dspark-gated"),
    "vllm-dflash-taps-absent": case("zlab-dflash-default-layers"),
    "vllm-dflash-window-causality": case(
        "speculators-dflash-clean",
        {
            "sliding_window_non_causal": DELETE,
            FROM_DECODER + "layer_types": ["sliding_attention", "sliding_attention"],
            FROM_DECODER + "use_sliding_window": True,
            FROM_DECODER + "sliding_window": 8,
        },
    ),
    "vllm-eagle-bias": case("eagle-bias"),
    "vllm-eagle3-bias-denied": case("safeailab-eagle3-qkv-bias", {"attention_bias": False}),
    "vllm-mtp-quantized-config": case("hf-llama-fp8-mtp-forgotten"),
    "vllm-mtp-no-class": case("deepseek-mtp-clean"),
    "vllm-medusa-removed": case("medusa-clean"),
    "vllm-no-class": case("hydra-clean"),
    "sglang-speculators": case(EAGLE3),
    "sglang-base-architecture": case("eagle-clean"),
    "sglang-norm-before-residual": case(SPECFORGE, {"norm_before_residual": True}),
    "sglang-norm-before-fc-early": case("speculators-eagle3-last-state"),
    "sglang-layer-parts-dropped": case("safeailab-eagle3-qkv-bias"),
    "sglang-own-embedding": case(
        SPECFORGE, {"embed_requires_grad": True}, add={"embed_tokens.weight": (64, 16)}
    ),
    "sglang-aux-layers-top-level": case(
        SPECFORGE, {"eagle_config": DELETE, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    ),
    "sglang-draft-vocab-absent": case("deepspec-eagle3-clean"),
    "sglang-head-missing": case(SPECFORGE, drop=("lm_head.weight",)),
    "sglang-map-missing": case(SPECFORGE, drop=("d2t", "t2d")),
    "sglang-absolute-map": case("speculators-eagle3-map-absolute"),
    "sglang-unknown-tensors": case(SPECFORGE, add={"adapter.weight": (16, 16)}),
    "sglang-missing-tensors": case(SPECFORGE, drop=("norm.weight",)),
    "sglang-peagle": case("peagle-clean"),
    "sglang-eagle-bias-missing": case("eagle-clean"),
    "sglang-dspark-anchor-early": case("deepspec-dspark-bonus-anchor"),
    "sglang-dspark-anchor-absent": case(
        "deepspec-dspark-bonus-anchor", {"sample_from_anchor": DELETE, "dspark_bonus_anchor": True}
    ),
    "sglang-dspark-markov-rank": case("deepspec-dspark-dflash"),
    "sglang-dspark-reduced-head": case("deepspec-dspark-clean", {"draft_vocab_size": 24}),
    "sglang-aux-layer-not-captured": case(
        SPECFORGE,
        {"num_target_layers": 8, "eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
    ),
    "sglang-block-vocabulary": case("zlab-dflash-clean", {"draft_vocab_size": 24}),
    "sglang-dflash2-early": case("zlab-dflash2-clean"),
    "sglang-domino-early": case("domino-clean"),
    "sglang-mtp-count": case("deepseek-mtp-clean", {"num_nextn_predict_layers": DELETE}),
    "sglang-mtp-quantized-config": case("hf-llama-fp8-mtp-forgotten"),
    "sglang-no-algorithm": case("medusa-clean"),
    "tensorrt-llm-speculators": case(EAGLE3),
    "tensorrt-llm-norm-before-residual": case(SPECFORGE, {"norm_before_residual": True}),
    "tensorrt-llm-norm-before-fc": case(SPECFORGE, {"norm_before_fc": True}),
    "tensorrt-llm-qk-norm": case("deepspec-eagle3-clean"),
    "tensorrt-llm-own-embedding": case(
        SPECFORGE, {"embed_requires_grad": True}, add={"embed_tokens.weight": (64, 16)}
    ),
    "tensorrt-llm-head-missing": case(SPECFORGE, drop=("lm_head.weight",)),
    "tensorrt-llm-map-missing": case(SPECFORGE, drop=("d2t", "t2d")),
    "tensorrt-llm-absolute-map": case("speculators-eagle3-map-absolute"),
    "tensorrt-llm-draft-vocab-absent": case(SPECFORGE, {"draft_vocab_size": DELETE}),
    "tensorrt-llm-eagle-bias-missing": case("eagle-clean"),
    "tensorrt-llm-no-class": case("peagle-clean"),
}


def read(found: Case) -> DraftCheckpoint:
    name, config, edits = found
    return formats.read_draft(opened(name, config, **edits))  # type: ignore[arg-type]


def met(draft: DraftCheckpoint) -> set[str]:
    return {row.name for verdict in judge(draft) for row in verdict.rows}


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert set(CASES) == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_rule_holds_for_its_case(name: str) -> None:
    assert name in met(read(CASES[name]))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_says_where_it_was_read(rule: Rule) -> None:
    assert rule.name.startswith(rule.engine)
    assert rule.source
    assert rule.versions
    assert not rule.reason.endswith(".")


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [
        (EAGLE3, {"vllm": "loads", "sglang": "refused", "tensorrt-llm": "refused"}),
        (SPECFORGE, {"vllm": "loads", "sglang": "loads", "tensorrt-llm": "loads"}),
        ("deepspec-dspark-clean", {"vllm": "loads", "sglang": "loads"}),
        ("zlab-dflash-clean", {"vllm": "loads", "sglang": "loads"}),
        ("speculators-mtp-clean", {"vllm": "refused", "sglang": "refused"}),
        ("eagle-clean", {"vllm": "loads", "sglang": "wrong"}),
    ],
)
def test_the_verdict_on_a_clean_draft(name: str, outcomes: Mapping[str, str]) -> None:
    found = {verdict.engine: verdict.outcome for verdict in judge(read(case(name)))}
    assert found.items() >= outcomes.items()


def test_a_rule_of_an_older_release_does_not_decide() -> None:
    verdict = next(v for v in judge(read(case(DSPARK))) if v.engine == "vllm")
    assert verdict.outcome == "loads"
    assert {row.is_current for row in verdict.rows} == {False}


def test_an_algorithm_that_nobody_examined_is_not_said_to_load() -> None:
    found = {verdict.engine: verdict.outcome for verdict in judge(read(case("domino-clean")))}
    assert found == {"vllm": "refused", "sglang": "unknown", "tensorrt-llm": "unknown"}


def test_a_state_out_of_reach_needs_the_targets_depth() -> None:
    """SGLang takes states at the entry of a layer; NeMo Automodel issue 3082."""
    draft = read(case(SPECFORGE, {"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 7]}))
    assert "sglang-aux-layer-not-captured" not in met(draft)
    whole = target("hf-llama-clean")
    rows = [row.name for v in judge(complete_draft(draft, whole), whole) for row in v.rows]
    assert "sglang-aux-layer-not-captured" in rows


def test_validate_makes_findings_of_the_engines_that_are_named() -> None:
    source = str(CHECKPOINTS / EAGLE3)
    assert validate([source]).is_clean
    assert validate([source], engines=["vllm"]).is_clean
    refused = validate([source], engines=["sglang"])
    assert [d.code for d in refused.results[0].diagnostics] == ["SD212"]
    wrong = validate([str(CHECKPOINTS / "eagle-clean")], engines=["sglang"])
    assert "SD213" in [d.code for d in wrong.results[0].diagnostics]
    assert Path(wrong.results[0].diagnostics[-1].where.split("#")[0]).name == "config.json"


def test_the_engines_are_those_of_the_table() -> None:
    assert set(ENGINE_NAMES) == set(ENGINES) == {rule.engine for rule in RULES}
