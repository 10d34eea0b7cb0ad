"""Which evidence is of which format of drafts of numbered heads, and of PARD."""

from __future__ import annotations

from specctl.formats import target
from specctl.formats.format import Evidence

PARD_MASK_KEYS = ("pard_token", "ptd_token_id")


def medusa(evidence: Evidence) -> str | None:
    if evidence.value_mark("model_type", "medusa") is not None:
        return None
    return evidence.config_mark("medusa_num_heads") or evidence.layout_mark("medusa")


def vllm_medusa(evidence: Evidence) -> str | None:
    return evidence.value_mark("model_type", "medusa") or evidence.layout_mark("vllm-medusa")


def pard(evidence: Evidence) -> str | None:
    """Return the config's mark of a causal LM that was trained as a parallel draft."""
    mark = evidence.config_mark(*PARD_MASK_KEYS)
    is_model = target.claim(evidence) is not None and not evidence.layouts
    return mark if is_model else None


def redrafter(evidence: Evidence) -> str | None:
    return (
        evidence.value_mark("model_type", "recurrent_drafting_drafter")
        or evidence.config_mark("redrafter_num_beams", "redrafter_draft_len_per_beam")
        or evidence.layout_mark("redrafter")
    )
