"""Drafts without attention of their own (Medusa, Hydra, MLPSpeculator), PARD, and ReDrafter."""

from __future__ import annotations

from specctl.formats.format import Format, Layout, at
from specctl.formats.heads import claims

_PACKAGE = "specctl.formats.heads"
_MEDUSA = f"{_PACKAGE}.medusa"

LAYOUTS: tuple[Layout, ...] = (
    Layout(name="medusa", pattern=r"\{i\}\.\{i\}\.linear\.weight"),
    Layout(name="vllm-medusa", pattern=r"(medusa_heads\.)?blocks\.\{i\}\.layers\.\{i\}\.weight"),
    Layout(name="hydra", pattern=r"hydra_mlp\.\{i\}\.\{i\}\.linear\.weight"),
    Layout(name="mlp-speculator", pattern=r"speculator\.(emb|proj|head)\.\{i\}\.weight"),
    Layout(name="redrafter", pattern=r"(drafter\.)?rnn_[uw]\.weight"),
)


FORMATS: tuple[Format, ...] = (
    Format(
        name="medusa",
        title="Medusa",
        role="draft",
        algorithm="medusa",
        layouts=("medusa",),
        claim=claims.medusa,
        read=at(_MEDUSA, "read_original"),
        source="FasterDecoding/Medusa medusa_model.py",
    ),
    Format(
        name="vllm-medusa",
        title="Medusa, vLLM",
        role="draft",
        algorithm="medusa",
        layouts=("vllm-medusa",),
        claim=claims.vllm_medusa,
        read=at(_MEDUSA, "read_vllm"),
        source="vLLM model_executor/models/medusa.py",
    ),
    Format(
        name="hydra",
        title="Hydra",
        role="draft",
        algorithm="hydra",
        layouts=("hydra",),
        claim=lambda evidence: (
            evidence.config_mark("hydra_num_heads") or evidence.layout_mark("hydra")
        ),
        read=at(f"{_PACKAGE}.hydra", "read"),
        source="zankner/Hydra hydra/model/hydra_heads",
    ),
    Format(
        name="mlp-speculator",
        title="MLPSpeculator",
        role="draft",
        algorithm="mlp_speculator",
        layouts=("mlp-speculator",),
        claim=lambda evidence: (
            evidence.value_mark("model_type", "mlp_speculator")
            or evidence.layout_mark("mlp-speculator")
        ),
        read=at(f"{_PACKAGE}.mlp_speculator", "read"),
        source="foundation-model-stack/fms-extras MLPSpeculator",
    ),
    Format(
        name="pard",
        title="PARD",
        role="draft",
        algorithm="pard",
        layouts=(),
        claim=claims.pard,
        read=at(f"{_PACKAGE}.pard", "read"),
        source="AMD-AIG-AIMA/PARD",
        refines=("huggingface",),
    ),
    Format(
        name="redrafter",
        title="ReDrafter",
        role="draft",
        algorithm="redrafter",
        layouts=("redrafter",),
        claim=claims.redrafter,
        read=None,
        source="apple/ml-recurrent-drafting; TensorRT-LLM examples/redrafter",
    ),
)
