"""Block drafts: one forward over several slots (DFlash, DSpark and their relatives)."""

from __future__ import annotations

from specctl.draft import Algorithm
from specctl.formats.format import Evidence, Format, Layout, at

_PACKAGE = "specctl.formats.block"
_FLAT = f"{_PACKAGE}.flat"
_SPECULATORS = f"{_PACKAGE}.speculators"
_WRITERS = f"{_PACKAGE}.writers"

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="dspark",
        pattern=r"(logit_head\.)?(markov_head|confidence_head)\..*",
    ),
    Layout(
        name="dspark-flat",
        pattern=r"markov_w[12]\.weight|(confidence|gate|joint)_proj\.(weight|bias)",
    ),
    Layout(name="dspark-stages", pattern=r"mtp\.\{i\}\.(main_proj|markov_head)\..*"),
    Layout(name="dflash2", pattern=r"candidate_selector\..*"),
    Layout(name="domino", pattern=r"(logit_head\.)?prefix_gru\..*"),
    Layout(name="xpress", pattern=r"refiner_head\..*"),
)

_DSPARK_CLASSES = (
    "Qwen3DSparkModel",
    "Gemma4DSparkModel",
    "Qwen3OmniDSparkModel",
    "DSparkDraftModel",
    "KimiK3DSparkMLADraftModel",
)
_DFLASH_CLASSES = ("DFlashDraftModel", "KimiK3DFlashDraftModel")


def _projector(evidence: Evidence) -> object:
    section = evidence.config.get("dflash_config")
    return section.get("projector_type") if isinstance(section, dict) else None


def _has_backbone(evidence: Evidence) -> bool:
    return {"fc.weight", "hidden_norm.weight"} <= evidence.generic.keys()


def _claim_dflash(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    named = evidence.architecture_mark(*_DFLASH_CLASSES) or evidence.config_mark("dflash_config")
    if named is not None or evidence.layouts:
        return named
    return "tensor hidden_norm.weight" if _has_backbone(evidence) else None


def _claim_laguna(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    if evidence.config_mark("dflash_config") is None:
        return evidence.architecture_mark("DFlashLagunaForCausalLM")
    return evidence.architecture_mark("DFlashLagunaForCausalLM") or evidence.value_mark(
        "model_type", "laguna"
    )


def _claim_dspark(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    if _projector(evidence) == "dspark":
        return evidence.config_mark("dflash_config")
    prefixed = evidence.config_mark("dspark_block_size") if _has_backbone(evidence) else None
    return (
        evidence.architecture_mark(*_DSPARK_CLASSES)
        or evidence.config_mark("dspark_config")
        or prefixed
        or evidence.layout_mark("dspark")
    )


def _claim_flat_dspark(evidence: Evidence) -> str | None:
    return None if evidence.is_speculators else evidence.layout_mark("dspark-flat")


def _claim_dflash2(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    return evidence.architecture_mark("DFlash2DraftModel") or evidence.layout_mark("dflash2")


def _claim_domino(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    if _projector(evidence) == "domino":
        return evidence.config_mark("dflash_config")
    return evidence.architecture_mark("DominoDraftModel") or evidence.layout_mark("domino")


def _speculators(kind: Algorithm, title: str, source: str, *layouts: str) -> Format:
    return Format(
        name=f"speculators-{kind}",
        title=title,
        role="draft",
        algorithm=kind,
        layouts=layouts,
        claim=lambda evidence: evidence.value_mark("speculators_model_type", kind),
        read=at(_SPECULATORS, "read", kind),
        source=source,
        write=at(_WRITERS, "write_speculators", kind),
    )


FORMATS: tuple[Format, ...] = (
    _speculators("dflash", "DFlash, Speculators", "Speculators 0.5 to 0.9 DFlashSpeculatorConfig"),
    _speculators(
        "dflash2", "DFlash2, Speculators", "Speculators 0.9 DFlash2SpeculatorConfig", "dflash2"
    ),
    _speculators(
        "dspark", "DSpark, Speculators", "Speculators 0.7 to 0.9 DSparkSpeculatorConfig", "dspark"
    ),
    _speculators(
        "xpress", "XPress, Speculators", "Speculators 0.9 XPressSpeculatorConfig", "xpress"
    ),
    Format(
        name="zlab-dflash",
        title="DFlash, z-lab",
        role="draft",
        algorithm="dflash",
        layouts=(),
        claim=_claim_dflash,
        read=at(_FLAT, "read", "zlab-dflash"),
        source="z-lab/dflash 0.1.0 DFlashDraftModel",
        write=at(_WRITERS, "write_zlab", "zlab-dflash"),
    ),
    Format(
        name="zlab-dflash2",
        title="DFlash2, z-lab",
        role="draft",
        algorithm="dflash2",
        layouts=("dflash2",),
        claim=_claim_dflash2,
        read=at(_FLAT, "read", "zlab-dflash2"),
        source="z-lab/dflash 0.1.0 DFlash2DraftModel",
        write=at(_WRITERS, "write_zlab", "zlab-dflash2"),
        refines=("zlab-dflash",),
    ),
    Format(
        name="laguna-dflash",
        title="DFlash, Laguna",
        role="draft",
        algorithm="dflash",
        layouts=(),
        claim=_claim_laguna,
        read=at(_FLAT, "read", "laguna-dflash"),
        source="poolside/Laguna-S-2.1-DFlash",
        refines=("zlab-dflash",),
    ),
    Format(
        name="deepspec-dspark",
        title="DSpark and DFlash, DeepSpec; DSpark, SpecForge",
        role="draft",
        algorithm="dspark",
        layouts=("dspark",),
        claim=_claim_dspark,
        read=at(_FLAT, "read", "deepspec-dspark"),
        source="deepseek-ai/DeepSpec; sgl-project/SpecForge DSparkDraftModel",
        write=at(_WRITERS, "write_deepspec"),
        refines=("zlab-dflash",),
    ),
    Format(
        name="modelopt-dspark",
        title="DSpark, ModelOpt",
        role="draft",
        algorithm="dspark",
        layouts=("dspark-flat",),
        claim=_claim_flat_dspark,
        read=at(_FLAT, "read", "modelopt-dspark"),
        source="NVIDIA Model-Optimizer DSpark export, pull request 2149",
        write=at(_WRITERS, "write_modelopt"),
        refines=("deepspec-dspark", "zlab-dflash"),
    ),
    Format(
        name="domino",
        title="Domino",
        role="draft",
        algorithm="domino",
        layouts=("domino",),
        claim=_claim_domino,
        read=at(_FLAT, "read", "domino"),
        source="SpecForge and ModelOpt DominoDraftModel",
        refines=("zlab-dflash",),
    ),
    Format(
        name="deepseek-v4-dspark",
        title="DSpark inside DeepSeek-V4",
        role="draft",
        algorithm="dspark",
        layouts=("dspark-stages",),
        claim=lambda evidence: evidence.layout_mark("dspark-stages"),
        read=at(f"{_PACKAGE}.bundled", "read"),
        source="deepseek-ai DeepSeek-V4-*-DSpark",
        is_bundled=True,
        refines=("deepspec-dspark", "deepseek-v4-mtp"),
    ),
)
