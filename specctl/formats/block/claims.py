"""By which evidence each format of block drafts recognises its own."""

from __future__ import annotations

from specctl.formats.format import Evidence

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


def dflash(evidence: Evidence) -> str | None:
    """Return the mark of the architecture, `dflash_config`, or the backbone alone."""
    if evidence.is_speculators:
        return None
    named = evidence.architecture_mark(*_DFLASH_CLASSES) or evidence.config_mark("dflash_config")
    if named is not None or evidence.layouts:
        return named
    return "tensor hidden_norm.weight" if _has_backbone(evidence) else None


def laguna(evidence: Evidence) -> str | None:
    """Return the mark of Laguna's architecture or model type."""
    if evidence.is_speculators:
        return None
    if evidence.config_mark("dflash_config") is None:
        return evidence.architecture_mark("DFlashLagunaForCausalLM")
    return evidence.architecture_mark("DFlashLagunaForCausalLM") or evidence.value_mark(
        "model_type", "laguna"
    )


def dspark(evidence: Evidence) -> str | None:
    """Return the mark of the architectures, sections, prefixes or heads of DSpark."""
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


def flat_dspark(evidence: Evidence) -> str | None:
    """Return the mark of ModelOpt's flat names of DSpark's heads."""
    return None if evidence.is_speculators else evidence.layout_mark("dspark-flat")


def dflash2(evidence: Evidence) -> str | None:
    """Return the mark of the architecture or the candidate selector."""
    if evidence.is_speculators:
        return None
    return evidence.architecture_mark("DFlash2DraftModel") or evidence.layout_mark("dflash2")


def domino(evidence: Evidence) -> str | None:
    """Return the mark of the projector type, the architecture or the prefix GRU."""
    if evidence.is_speculators:
        return None
    if _projector(evidence) == "domino":
        return evidence.config_mark("dflash_config")
    return evidence.architecture_mark("DominoDraftModel") or evidence.layout_mark("domino")


def stages(evidence: Evidence) -> str | None:
    """Return the mark of stages inside a DeepSeek-V4 target."""
    return evidence.layout_mark("dspark-stages")
