"""Drafts without attention of their own (Medusa, Hydra, MLPSpeculator), PARD, and ReDrafter."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.formats.format import Evidence, Format, Layout
from specctl.formats.heads import hydra, medusa, mlp_speculator, pard
from specctl.formats.heads.indexed import Table, table

LAYOUTS: tuple[Layout, ...] = (
    Layout(name="medusa", pattern=r"\{i\}\.\{i\}\.linear\.weight"),
    Layout(name="vllm-medusa", pattern=r"(medusa_heads\.)?blocks\.\{i\}\.layers\.\{i\}\.weight"),
    Layout(name="hydra", pattern=r"hydra_mlp\.\{i\}\.\{i\}\.linear\.weight"),
    Layout(name="mlp-speculator", pattern=r"speculator\.(emb|proj|head)\.\{i\}\.weight"),
    Layout(name="redrafter", pattern=r"(drafter\.)?rnn_[uw]\.weight"),
)


def _claim_medusa(evidence: Evidence) -> str | None:
    if evidence.value_mark("model_type", "medusa") is not None:
        return None
    return evidence.config_mark("medusa_num_heads") or evidence.layout_mark("medusa")


def _claim_vllm_medusa(evidence: Evidence) -> str | None:
    return evidence.value_mark("model_type", "medusa") or evidence.layout_mark("vllm-medusa")


def _claim_redrafter(evidence: Evidence) -> str | None:
    return (
        evidence.value_mark("model_type", "recurrent_drafting_drafter")
        or evidence.config_mark("redrafter_num_beams", "redrafter_draft_len_per_beam")
        or evidence.layout_mark("redrafter")
    )


FORMATS: tuple[Format, ...] = (
    Format(
        name="medusa",
        title="Medusa",
        role="draft",
        algorithm="medusa",
        layouts=("medusa",),
        claim=_claim_medusa,
        read=medusa.read_original,
        source="FasterDecoding/Medusa medusa_model.py",
    ),
    Format(
        name="vllm-medusa",
        title="Medusa, vLLM",
        role="draft",
        algorithm="medusa",
        layouts=("vllm-medusa",),
        claim=_claim_vllm_medusa,
        read=medusa.read_vllm,
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
        read=hydra.read,
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
        read=mlp_speculator.read,
        source="foundation-model-stack/fms-extras MLPSpeculator",
    ),
    Format(
        name="pard",
        title="PARD",
        role="draft",
        algorithm="pard",
        layouts=(),
        claim=pard.claim,
        read=pard.read,
        source="AMD-AIG-AIMA/PARD",
        refines=("huggingface",),
    ),
    Format(
        name="redrafter",
        title="ReDrafter",
        role="draft",
        algorithm="redrafter",
        layouts=("redrafter",),
        claim=_claim_redrafter,
        read=None,
        source="apple/ml-recurrent-drafting; TensorRT-LLM examples/redrafter",
    ),
)

SYMBOLS: Mapping[str, str] = MappingProxyType(
    {
        "S": "rows of a stored head: V, or R when they were cut to the map",
        "E": "width of the target's states (`emb_dim`)",
        "I": "width of a step's state (`inner_dim`)",
    }
)
"""Shape symbols of these formats beside `contract.roles.SHAPE_SYMBOLS`."""

EXAMPLES: Mapping[str, Table] = MappingProxyType(
    {
        "medusa (one head of one block)": table(medusa.original_rows(1, 1)),
        "vllm-medusa (one head of one block)": table(medusa.vllm_rows(1, 1, is_shared=False)),
        "hydra (one grounded head)": table(
            hydra.head_rows(["hydra_mlp.0.1.linear.weight"], 1, is_grounded=True)
        ),
        "mlp-speculator (two tied steps)": table(mlp_speculator.step_rows(2, is_tied=True)),
    }
)
"""Names and roles for the smallest counts; the tables of a file are made for its own counts."""
