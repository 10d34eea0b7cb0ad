"""Every rule a checkpoint is judged by has codes, and each code a fixture that shows it.

The table is the list of rules; `expected.yaml` holds what each fixture gives, and the golden tests
hold the fixtures to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.contract.codes import CODES

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load(
    (FIXTURES / "expected.yaml").read_text("utf-8")
)
E3, DSPARK, NUMBERS = "speculators-eagle3-", "speculators-dspark-", "speculators-eagle3-numbers-"

# Rule -> what it says, and code -> fixtures that show it.
RULES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "R1": (
        "fc reads the captured states, or embedding and state",
        {"SD503": (f"{E3}narrow-fc", f"{E3}layers-four", f"{DSPARK}fc-narrow")},
    ),
    "R2": ("fc yields the draft's width", {"SD503": (f"{E3}fc-rows",)}),
    "R3": (
        "query rows are heads times head size, and the input is what the format says",
        {"SD503": (f"{E3}head-dim-wrong", f"{E3}shape-wrong")},
    ),
    "R4": (
        "head rows are draft ids; an embedding has at least a row for each target id",
        {"SD503": (f"{E3}head-rows", f"{E3}embedding-short")},
    ),
    "R5": (
        "the map: present, in range, unique, decided, and what the mask marks",
        {
            "SD133": (f"{E3}map-float",),
            "SD222": (f"{E3}map-ranked",),
            "SD401": (f"{E3}map-missing",),
            "SD402": (f"{E3}map-negative", f"{E3}map-too-large"),
            "SD403": (f"{E3}map-ambiguous",),
            "SD404": (f"{E3}map-duplicate",),
            "SD405": (f"{E3}mask-short", f"{E3}mask-length", f"{E3}mask-other"),
            "SD406": (f"{E3}end-id-absent",),
            "SD408": (f"{E3}map-absolute",),
            "SD409": (f"{E3}map-zero",),
            "SD410": (f"{E3}map-length",),
            "SD416": (f"{E3}map-padding",),
        },
    ),
    "R6": (
        "captured layers: ascending, unique, in range, in a known numbering",
        {
            "SD303": ("specforge-eagle3-undecided-ids",),
            "SD304": (f"{E3}layer-too-deep",),
            "SD306": (f"{E3}default-layers-alone",),
            "SD308": (f"{E3}layers-unordered", f"{E3}layers-repeated"),
            "SD312": (f"{E3}last-state",),
            "SD324": ("zlab-dflash-default-layers",),
            "SD331": (f"{E3}layers-as-outputs",),
        },
    ),
    "R7": (
        "token count against block and anchor",
        {"SD302": (f"{DSPARK}width-mismatch",), "SD307": (f"{DSPARK}anchor-unstated",)},
    ),
    "R8": (
        "the mask token has a row, or its vector a file",
        {
            "SD314": (f"{DSPARK}mask-outside", f"{DSPARK}mask-missing", "pard-mask-outside"),
            "SD333": (f"{DSPARK}mask-text",),
            "SD322": ("zlab-dflash-mask-file-short", "zlab-dflash-mask-file-other"),
            "SD417": ("pard-numbers-mask-beside",),
            "SD529": ("pard-numbers-mask-row",),
        },
    ),
    "R9": (
        "Markov matrices: target ids in, draft ids out, one rank",
        {"SD503": (f"{DSPARK}markov-swapped", f"{DSPARK}rank-wrong")},
    ),
    "R10": (
        "the confidence head reads state and Markov embedding as stated",
        {"SD503": (f"{DSPARK}confidence-narrow",), "SD313": (f"{DSPARK}confidence-alone",)},
    ),
    "R11": (
        "flags and tensors agree in both directions",
        {
            "SD501": (f"{E3}norm-missing", "eagle-bias-missing", "speculators-eagle-norms-missing"),
            "SD506": (f"{E3}norm-unflagged", "eagle-bias-denied", "vllm-medusa-bias-unflagged"),
            "SD318": ("eagle-bias-unstated",),
        },
    ),
    "R12": (
        "a reduced head is not tied, and the flag has one value",
        {"SD414": (f"{E3}tied-reduced",), "SD418": ("hf-multimodal-tie-twice",)},
    ),
    "R13": (
        "the layers of the file, not of the config",
        {"SD310": ("safeailab-eagle3-layers-40",), "SD328": ("medusa-count-wrong",)},
    ),
    "R14": (
        "quantised weights, scales and configs belong together",
        {
            "SD508": (f"{E3}fp8",),
            "SD511": (f"{E3}fp8-scale-missing",),
            "SD512": (f"{E3}fp8-scale-alone",),
            "SD513": (f"{E3}fp8-scale-shape",),
            "SD514": (f"{E3}fp8-declared-only",),
            "SD515": (f"{E3}fp8-undeclared", f"{E3}weight-int8"),
            "SD516": (f"{E3}fp8-fused-list",),
            "SD517": (f"{E3}fp8-two-configs",),
            "SD518": ("hf-llama-fp8-mtp-forgotten",),
            "SD519": (f"{E3}plain-for-fp8",),
        },
    ),
    "R15": (
        "rotary numbers: one statement, and another than the target's is said",
        {"SD208": (f"{E3}rope-conflict",), "SD329": (f"{E3}other-rope",)},
    ),
    "R16": (
        "prediction layers: the count and the tensors",
        {
            "SD310": ("hf-qwen35-mtp-count",),
            "SD326": ("hf-qwen35-mtp-unannounced",),
            "SD327": ("hf-minimax-mtp-absent",),
        },
    ),
    "R17": (
        "index, shards and names of files",
        {
            "SD102": ("container-shard-missing",),
            "SD104": ("container-two-shards", "container-stray-again"),
            "SD122": ("container-no-index", "container-half-uploaded"),
            "SD124": ("container-stray-file",),
            "SD125": ("container-index-promises", "container-index-wrong-shard"),
            "SD126": ("container-index-forgets",),
            "SD129": ("container-index-size",),
            "SD130": ("container-shard-count",),
            "SD531": ("container-file-name",),
        },
    ),
    "R18": ("the target has a name", {"SD209": (f"{E3}target-unnamed",)}),
    "R19": (
        "the default proposal method exists and drafts a token",
        {
            "SD210": (f"{E3}method-unknown",),
            "SD301": (f"{E3}gamma-missing",),
            "SD207": (f"{E3}tokens-zero",),
        },
    ),
    "R20": (
        "what nobody reads is listed",
        {"SD502": (f"{E3}tensor-unknown",), "SD211": (f"{E3}field-unknown",)},
    ),
    "R21": (
        "weights that were never written or trained",
        {
            "SD520": (f"{NUMBERS}nan", f"{NUMBERS}infinite"),
            "SD521": (f"{NUMBERS}zero-embedding", f"{NUMBERS}zero-norm"),
            "SD522": (f"{NUMBERS}zero-rows", "hf-llama-numbers-half"),
            "SD523": (f"{NUMBERS}equal-rows",),
            "SD524": ("hf-llama-numbers-fresh",),
            "SD528": (f"{NUMBERS}constant",),
        },
    ),
    "R22": ("mask_hidden has the width of all states", {"SD503": ("peagle-mask-hidden-narrow",)}),
    "R23": (
        "an absent head size follows from the rows, or nothing",
        {"SD309": (f"{E3}head-dim-absent",), "SD206": (f"{E3}head-dim-unknown",)},
    ),
}
# Two sources that do not belong together are refused with both numbers.
WRONG_PAIRS = {
    "SD305": (f"{E3}other-width", "mlp-speculator-other-width"),
    "SD332": (f"{E3}other-epsilon",),
    "SD317": ("deepseek-mtp-other-depth",),
    "SD411": (f"{E3}other-vocab",),
    "SD419": (f"{E3}other-tokenizer",),
    "SD509": (f"{E3}no-embedding",),
    "SD525": (f"{NUMBERS}shared",),
    "SD526": (f"{NUMBERS}trained",),
    "SD527": (f"{NUMBERS}unrelated",),
    "SD532": (f"{NUMBERS}other-order",),
}


def test_the_table_names_every_rule() -> None:
    assert list(RULES) == [f"R{number}" for number in range(1, 24)]
    assert all(text and codes for text, codes in RULES.values())


@pytest.mark.parametrize("rule", [*RULES, "pairs"])
def test_a_rule_is_shown_by_fixtures(rule: str) -> None:
    table = WRONG_PAIRS if rule == "pairs" else RULES[rule][1]
    for code, names in table.items():
        assert code in CODES
        assert names
        for name in names:
            assert code in EXPECTED[f"checkpoints/{name}"]["codes"], (rule, code, name)


def test_every_code_of_these_checks_belongs_to_a_rule() -> None:
    named = {code for _, table in RULES.values() for code in table} | WRONG_PAIRS.keys()
    own = {code for code in CODES if "SD511" <= code <= "SD539" or "SD416" <= code <= "SD419"}
    assert sorted((own | {"SD328", "SD329"}) - named) == []
