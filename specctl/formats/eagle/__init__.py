"""EAGLE drafts: one decoder layer, or few, over (embedding, state)."""

from __future__ import annotations

from specctl.formats.eagle import safeailab, speculators
from specctl.formats.format import Evidence, Format, Layout

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="eagle3",
        pattern=r"(model\.)?midlayer\..*|(model\.)?layers\.\{i\}\.hidden_norm\.weight",
    ),
    Layout(name="peagle", pattern=r"mask_hidden"),
    Layout(name="speculators-eagle", pattern=r"fusion_fc\.weight"),
)


def _claim_safeailab(evidence: Evidence) -> str | None:
    if evidence.is_speculators:
        return None
    if not evidence.generic and "draft_vocab_size" in evidence.config:
        return evidence.config_mark("draft_vocab_size")
    return evidence.layout_mark("eagle3")


FORMATS: tuple[Format, ...] = (
    Format(
        name="safeailab-eagle3",
        title="EAGLE-3, SafeAILab",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=_claim_safeailab,
        read=safeailab.read,
        source="SafeAILab/EAGLE eagle/model/cnets.py",
    ),
    Format(
        name="speculators-eagle3",
        title="EAGLE-3, Speculators",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=lambda evidence: evidence.value_mark("speculators_model_type", "eagle3"),
        read=speculators.read,
        source="Speculators 0.5 to 0.9 Eagle3SpeculatorConfig",
    ),
    Format(
        name="peagle",
        title="P-EAGLE",
        role="draft",
        algorithm="peagle",
        layouts=("eagle3", "peagle"),
        claim=lambda evidence: (
            None
            if evidence.is_speculators
            else evidence.architecture_mark("PEagleDraftModel") or evidence.layout_mark("peagle")
        ),
        read=None,
        source="SpecForge PEagleDraftModel",
        refines=("safeailab-eagle3",),
    ),
    Format(
        name="mla-eagle3",
        title="EAGLE-3 with MLA",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=lambda evidence: evidence.architecture_mark("Eagle3DeepseekV2ForCausalLM"),
        read=None,
        source="Model-Optimizer EAGLE-3 export for Kimi-K2",
        refines=("safeailab-eagle3",),
    ),
    Format(
        name="eagle",
        title="EAGLE-1 or EAGLE-2",
        role="draft",
        algorithm="eagle",
        layouts=(),
        claim=lambda evidence: (
            evidence.first_key(r"fc\.weight")
            if not evidence.layouts
            and not evidence.is_speculators
            and "hidden_norm.weight" not in evidence.generic
            and "dflash_config" not in evidence.config
            else None
        ),
        read=None,
        source="SafeAILab/EAGLE eagle/model/cnets1.py",
    ),
    Format(
        name="speculators-eagle",
        title="EAGLE-1, Speculators",
        role="draft",
        algorithm="eagle",
        layouts=("speculators-eagle",),
        claim=lambda evidence: evidence.layout_mark("speculators-eagle"),
        read=None,
        source="Speculators 0.1 to 0.6 EagleSpeculatorConfig",
    ),
)
