"""Prediction layers trained with their target (multi-token prediction), bundled or apart."""

from __future__ import annotations

import re

from specctl.checkpoint.config_sections import model_sections
from specctl.formats.format import Evidence, Format, Layout, at
from specctl.formats.mtp.families import FAMILIES
from specctl.formats.mtp.family import MtpFamily

_PACKAGE = "specctl.formats.mtp"
_WRITERS = f"{_PACKAGE}.writers"
_SPECULATORS = Layout(name="speculators-mtp", pattern=r"mtp_layers\.\{i\}\..*")
_GEMMA4 = Layout(name="gemma4-assistant", pattern=r"(?:pre|post)_projection\.weight")
_BY_LAYOUT = {family.layout: family for family in reversed(FAMILIES)}

LAYOUTS: tuple[Layout, ...] = (
    _SPECULATORS,
    *(
        Layout(name=name, pattern=family.layout_pattern)
        for name, family in reversed(_BY_LAYOUT.items())
    ),
    _GEMMA4,
)


def _claim(family: MtpFamily, evidence: Evidence) -> str | None:
    """Return the layout's mark; a family that shares a layout needs its model type or tensor."""
    mark = evidence.layout_mark(family.layout)
    if mark is None or evidence.is_speculators:
        return None
    if family is not _BY_LAYOUT[family.layout]:
        named = bool(family.model_types) and _model_types(evidence) & set(family.model_types)
        return mark if named or _has_own_fuse(family, evidence) else None
    return mark


def _has_own_fuse(family: MtpFamily, evidence: Evidence) -> bool:
    """Tell whether the family's fuse or output tensors are seen and no other family has them."""
    others = {key for other in FAMILIES if other is not family for _, key in other.names}
    own = [key for _, key in family.names if key not in others]
    roots = "|".join(re.escape(root) for root in family.roots)
    keys = "|".join(re.escape(key) for key in own)
    return bool(own) and evidence.first_key(f"(?:{roots})(?:{keys})") is not None


def _model_types(evidence: Evidence) -> set[str]:
    names = (section.get("model_type") for _, section in model_sections(evidence.config))
    return {name for name in names if isinstance(name, str)}


def _row(family: MtpFamily) -> Format:
    base = _BY_LAYOUT[family.layout]
    return Format(
        name=family.name,
        title=family.title,
        role="draft",
        algorithm="mtp",
        layouts=(family.layout,),
        claim=lambda evidence: _claim(family, evidence),
        read=at(f"{_PACKAGE}.generic", "read", family),
        source=family.source,
        refines=() if family is base else (base.name,),
        is_bundled=True,
        write=at(_WRITERS, "write_native", family),
    )


FORMATS: tuple[Format, ...] = (
    Format(
        name="speculators-mtp",
        title="MTP, Speculators",
        role="draft",
        algorithm="mtp",
        layouts=("speculators-mtp",),
        claim=lambda evidence: evidence.value_mark("speculators_model_type", "mtp"),
        read=at(f"{_PACKAGE}.speculators", "read"),
        source="Speculators 0.6 to 0.9 MTPSpeculatorConfig",
        write=at(_WRITERS, "write_speculators"),
    ),
    *(_row(family) for family in FAMILIES),
    Format(
        name="gemma4-assistant",
        title="Gemma-4 assistant (frozen-KV MTP)",
        role="draft",
        algorithm="gemma4_assistant",
        layouts=("gemma4-assistant",),
        claim=lambda evidence: (
            evidence.architecture_mark("Gemma4AssistantForCausalLM")
            or evidence.value_mark("model_type", "gemma4_assistant")
        ),
        read=at(f"{_PACKAGE}.gemma4_assistant", "read"),
        source="transformers 5.24 Gemma4AssistantForCausalLM",
        refines=("huggingface",),
    ),
)
