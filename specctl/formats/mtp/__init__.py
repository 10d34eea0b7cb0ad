"""Prediction layers trained with their target (multi-token prediction), bundled or apart."""

from __future__ import annotations

from specctl.formats.format import Format, Layout
from specctl.formats.mtp import deepseek, speculators

LAYOUTS: tuple[Layout, ...] = (
    Layout(name="speculators-mtp", pattern=r"mtp_layers\.\{i\}\..*"),
    Layout(name="deepseek-mtp", pattern=r"model\.layers\.\{i\}\.eh_proj\.weight"),
)

FORMATS: tuple[Format, ...] = (
    Format(
        name="speculators-mtp",
        title="MTP, Speculators",
        role="draft",
        algorithm="mtp",
        layouts=("speculators-mtp",),
        claim=lambda evidence: evidence.value_mark("speculators_model_type", "mtp"),
        read=speculators.read,
        source="Speculators 0.6 to 0.9 MTPSpeculatorConfig",
    ),
    Format(
        name="deepseek-mtp",
        title="MTP, DeepSeek's key layout",
        role="draft",
        algorithm="mtp",
        layouts=("deepseek-mtp",),
        claim=lambda evidence: evidence.layout_mark("deepseek-mtp"),
        read=deepseek.read,
        source="DeepSeek-V3 layer 61",
        is_bundled=True,
    ),
)
