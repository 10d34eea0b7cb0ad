"""EAGLE drafts: one decoder layer, or few, over (embedding, state)."""

from __future__ import annotations

from specctl.formats.eagle import claims
from specctl.formats.format import Format, Layout, at

_PACKAGE = "specctl.formats.eagle"
_FLAT = f"{_PACKAGE}.flat"
_EAGLE1 = f"{_PACKAGE}.eagle1"
_PEAGLE = f"{_PACKAGE}.peagle"
_WRITE_FLAT = f"{_PACKAGE}.write_flat"
_WRITE_OWN = f"{_PACKAGE}.write_own"
_WRITE_EAGLE1 = f"{_PACKAGE}.write_eagle1"
_WRITE_SPECULATORS = f"{_PACKAGE}.write_speculators"

LAYOUTS: tuple[Layout, ...] = (
    Layout(
        name="eagle3",
        pattern=r"(model\.)?midlayer\..*|(model\.)?layers\.\{i\}\.hidden_norm\.weight",
    ),
    Layout(name="peagle", pattern=r"(model\.)?mask_hidden"),
    Layout(name="speculators-eagle", pattern=r"fusion_fc\.weight"),
)

_EAGLE3_ROWS: tuple[Format, ...] = (
    Format(
        name="safeailab-eagle3",
        title="EAGLE-3, SafeAILab",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=claims.safeailab,
        read=at(_FLAT, "read_safeailab"),
        source="SafeAILab/EAGLE eagle/model/cnets.py",
        write=at(_WRITE_FLAT, "write_safeailab"),
    ),
    Format(
        name="specforge-eagle3",
        title="EAGLE-3, SpecForge",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=claims.specforge,
        read=at(_FLAT, "read_specforge"),
        source="SpecForge llama3_eagle.py and its export",
        write=at(_WRITE_FLAT, "write_specforge"),
    ),
    Format(
        name="modelopt-eagle3",
        title="EAGLE-3, ModelOpt and AngelSlim",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=claims.modelopt,
        read=at(_FLAT, "read_modelopt"),
        source="Model-Optimizer EAGLE-3 export template",
        write=at(_WRITE_FLAT, "write_modelopt"),
    ),
    Format(
        name="nemo-eagle3",
        title="EAGLE-3, NeMo Automodel",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=claims.nemo,
        read=at(_FLAT, "read_nemo"),
        source="NeMo Automodel LlamaEagle3DraftModel and serve_vllm",
        refines=("huggingface",),
        write=at(_WRITE_FLAT, "write_nemo"),
    ),
    Format(
        name="deepspec-eagle3",
        title="EAGLE-3, DeepSpec",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=claims.deepspec,
        read=at(f"{_PACKAGE}.deepspec", "read"),
        source="deepseek-ai/DeepSpec Qwen3Eagle3Model",
        refines=("modelopt-eagle3",),
        write=at(_WRITE_OWN, "write_deepspec"),
    ),
    Format(
        name="mla-eagle3",
        title="EAGLE-3 with latent attention",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=claims.latent_attention,
        read=at(f"{_PACKAGE}.mla", "read"),
        source="Model-Optimizer EAGLE-3 export for Kimi-K2",
        refines=("safeailab-eagle3", "specforge-eagle3", "modelopt-eagle3"),
        write=at(_WRITE_OWN, "write_mla"),
    ),
    Format(
        name="speculators-eagle3",
        title="EAGLE-3, Speculators",
        role="draft",
        algorithm="eagle3",
        layouts=("eagle3",),
        claim=lambda evidence: evidence.value_mark("speculators_model_type", "eagle3"),
        read=at(f"{_PACKAGE}.speculators", "read"),
        source="Speculators 0.5 to 0.9 Eagle3SpeculatorConfig",
        write=at(_WRITE_SPECULATORS, "write_eagle3"),
    ),
)

_PARALLEL_ROWS: tuple[Format, ...] = (
    Format(
        name="peagle",
        title="P-EAGLE",
        role="draft",
        algorithm="peagle",
        layouts=("eagle3", "peagle"),
        claim=claims.parallel,
        read=at(_PEAGLE, "read_native"),
        source="vLLM pull request 32887; SpecForge PEagleDraftModel; NeMo Automodel",
        refines=(
            "safeailab-eagle3",
            "specforge-eagle3",
            "modelopt-eagle3",
            "nemo-eagle3",
            "eagle",
            "huggingface",
        ),
        write=at(_WRITE_FLAT, "write_peagle"),
    ),
    Format(
        name="speculators-peagle",
        title="P-EAGLE, Speculators",
        role="draft",
        algorithm="peagle",
        layouts=("eagle3", "peagle"),
        claim=lambda evidence: evidence.value_mark("speculators_model_type", "peagle"),
        read=at(_PEAGLE, "read_speculators"),
        source="Speculators 0.6 to 0.9 PEagleSpeculatorConfig",
        write=at(_WRITE_SPECULATORS, "write_peagle"),
    ),
)

_EAGLE1_ROWS: tuple[Format, ...] = (
    Format(
        name="eagle",
        title="EAGLE-1, EAGLE-2 and HASS",
        role="draft",
        algorithm="eagle",
        layouts=(),
        claim=claims.eagle1,
        read=at(_EAGLE1, "read_native"),
        source="SafeAILab/EAGLE eagle/model/cnets1.py",
        write=at(_WRITE_EAGLE1, "write_native"),
    ),
    Format(
        name="vllm-eagle",
        title="EAGLE-1, vLLM's first wrapper",
        role="draft",
        algorithm="eagle",
        layouts=(),
        claim=claims.vllm_wrapper,
        read=at(_EAGLE1, "read_wrapper"),
        source="vLLM 0.6 transformers_utils/configs/eagle.py",
        refines=("eagle", "huggingface"),
    ),
    Format(
        name="speculators-eagle",
        title="EAGLE-1, Speculators",
        role="draft",
        algorithm="eagle",
        layouts=("speculators-eagle",),
        claim=claims.speculators_eagle1,
        read=at(_EAGLE1, "read_speculators"),
        source="Speculators 0.1 to 0.6 EagleSpeculatorConfig",
        write=at(_WRITE_EAGLE1, "write_speculators"),
    ),
)

FORMATS: tuple[Format, ...] = (*_EAGLE3_ROWS, *_PARALLEL_ROWS, *_EAGLE1_ROWS)
