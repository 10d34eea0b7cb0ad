"""Block drafts: one forward over several slots (DFlash, DSpark and their relatives)."""

from __future__ import annotations

from specctl.formats.block import speculators_dspark
from specctl.formats.format import Evidence, Format, Layout

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="dspark",
        pattern=r"markov_head\..*|markov_w1\.weight|confidence_head\..*|confidence_proj\..*",
    ),
    Layout(name="dflash2", pattern=r"candidate_selector\..*"),
    Layout(name="domino", pattern=r"(logit_head\.)?prefix_gru\..*"),
)


def _claim_dflash(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    if "fc.weight" in evidence.generic and "hidden_norm.weight" in evidence.generic:
        return "tensor hidden_norm.weight" if not evidence.layouts else None
    return evidence.config_mark("dflash_config")


FORMATS: tuple[Format, ...] = (
    Format(
        name="speculators-dspark",
        title="DSpark, Speculators",
        role="draft",
        algorithm="dspark",
        layouts=("dspark",),
        claim=lambda evidence: evidence.value_mark("speculators_model_type", "dspark"),
        read=speculators_dspark.read,
        source="Speculators 0.7 to 0.9 DSparkSpeculatorConfig",
        refines=("deepspec-dspark",),
    ),
    Format(
        name="deepspec-dspark",
        title="DSpark, DeepSpec",
        role="draft",
        algorithm="dspark",
        layouts=("dspark",),
        claim=lambda evidence: (
            evidence.config_mark("dspark_config", "dspark_block_size")
            or evidence.architecture_mark(
                "Qwen3DSparkModel", "Gemma4DSparkModel", "Qwen3OmniDSparkModel"
            )
        ),
        read=None,
        source="deepseek-ai/DeepSpec",
        refines=("zlab-dflash",),
    ),
    Format(
        name="zlab-dflash",
        title="DFlash, z-lab",
        role="draft",
        algorithm="dflash",
        layouts=(),
        claim=_claim_dflash,
        read=None,
        source="z-lab/dflash",
    ),
    Format(
        name="zlab-dflash2",
        title="DFlash2, z-lab",
        role="draft",
        algorithm="dflash2",
        layouts=("dflash2",),
        claim=lambda evidence: (
            None
            if evidence.is_speculators
            else evidence.architecture_mark("DFlash2DraftModel") or evidence.layout_mark("dflash2")
        ),
        read=None,
        source="z-lab/dflash DFlash2",
        refines=("zlab-dflash",),
    ),
    Format(
        name="domino",
        title="Domino",
        role="draft",
        algorithm="domino",
        layouts=("domino",),
        claim=lambda evidence: (
            None
            if evidence.is_speculators
            else evidence.architecture_mark("DominoDraftModel") or evidence.layout_mark("domino")
        ),
        read=None,
        source="SpecForge DominoDraftModel",
        refines=("zlab-dflash",),
    ),
)
