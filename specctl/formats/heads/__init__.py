"""Drafts without attention of their own (Medusa, Hydra, MLPSpeculator), and PARD."""

from __future__ import annotations

from specctl.formats.format import Format, Layout

LAYOUTS: tuple[Layout, ...] = (
    Layout(name="mlp-speculator", pattern=r"speculator\.emb\.\{i\}\.weight"),
)

FORMATS: tuple[Format, ...] = (
    Format(
        name="medusa",
        title="Medusa",
        role="draft",
        algorithm="medusa",
        layouts=(),
        claim=lambda evidence: evidence.config_mark("medusa_num_heads"),
        read=None,
        source="FasterDecoding/Medusa",
    ),
    Format(
        name="hydra",
        title="Hydra",
        role="draft",
        algorithm="hydra",
        layouts=(),
        claim=lambda evidence: evidence.config_mark("hydra_num_heads"),
        read=None,
        source="zankner/Hydra",
    ),
    Format(
        name="mlp-speculator",
        title="MLPSpeculator",
        role="draft",
        algorithm="mlp_speculator",
        layouts=("mlp-speculator",),
        claim=lambda evidence: evidence.layout_mark("mlp-speculator"),
        read=None,
        source="foundation-model-stack/fms-extras MLPSpeculator",
    ),
)
