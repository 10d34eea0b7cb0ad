"""Block drafts: one forward over several slots (DFlash, DSpark and their relatives)."""

from __future__ import annotations

from specctl.draft import Algorithm
from specctl.formats.block import claims
from specctl.formats.format import Format, Layout, at

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
        claim=claims.dflash,
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
        claim=claims.dflash2,
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
        claim=claims.laguna,
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
        claim=claims.dspark,
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
        claim=claims.flat_dspark,
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
        claim=claims.domino,
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
        claim=claims.stages,
        read=at(f"{_PACKAGE}.bundled", "read"),
        source="deepseek-ai DeepSeek-V4-*-DSpark",
        is_bundled=True,
        refines=("deepspec-dspark", "deepseek-v4-mtp"),
    ),
)
