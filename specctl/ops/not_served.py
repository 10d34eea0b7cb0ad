"""Say why a manifest cannot describe a target or a draft, with numbers and names (SD716)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from specctl.checkpoint import WEIGHT_DTYPES, tensor_place
from specctl.checks.quantization import QUANTISED_DTYPES
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import HIDDEN_ACTS, Decoder, DraftAlgorithm
from specctl.contract.roles import ALWAYS, OPTIONAL, find_role, roles_of_draft
from specctl.draft import DraftCheckpoint, TargetCheckpoint, served_algorithm
from specctl.formats.model_types import ARCHITECTURES

_ALGORITHMS = ", ".join(get_args(DraftAlgorithm))


def target_not_served(target: TargetCheckpoint, source: str) -> Iterator[Diagnostic]:
    """Yield SD716 for a target whose architecture the runtime does not compute.

    Args:
        target: as read; a supported one with a missing dimension has its own errors.
        source: as the user wrote it.
    """
    if target.decoder is not None:
        return
    notes = [d.message for d in target.diagnostics if d.code == "SD203"]
    if not notes:
        return
    layers = "an unknown number of" if target.num_layers is None else target.num_layers
    yield diagnose(
        "SD716",
        where=f"{source}/config.json#/architectures",
        message=f"this target of architecture `{target.architecture or 'unstated'}` ({layers} "
        f"layers, hidden size {target.hidden_size}) is not served",
        expected=", ".join(ARCHITECTURES),
        found=target.architecture or "nothing",
        notes=notes,
    )


def draft_not_served(draft: DraftCheckpoint, source: str) -> Iterator[Diagnostic]:
    """Yield SD716 for a draft whose algorithm or layers the runtime does not compute.

    Args:
        draft: as read, without errors; one with a missing dimension has its own.
        source: as the user wrote it.
    """
    where = f"{source}/config.json#"
    if served_algorithm(draft.algorithm) is None:
        yield diagnose(
            "SD716",
            where=where,
            message=f"drafts of algorithm `{draft.algorithm}` ({draft.format}, "
            f"{len(draft.tensors)} tensors) are not served",
            expected=_ALGORITHMS,
            found=draft.algorithm,
        )
    elif draft.decoder is None:
        yield diagnose(
            "SD716",
            where=where,
            message=f"the layers of this {draft.algorithm} draft ({draft.format}, "
            f"{len(draft.tensors)} tensors) are not served: {_kind(draft)}",
            expected="dense layers of the llama, mistral, qwen2 or qwen3 family",
            found=_kind(draft),
        )
    else:
        yield from _other_parts(draft, where)


def _other_parts(draft: DraftCheckpoint, where: str) -> Iterator[Diagnostic]:
    """Yield SD716 for a variant of a served algorithm: parts more, or parts less."""
    num_layers = 0 if draft.decoder is None else draft.decoder.num_layers
    table = roles_of_draft(draft.algorithm, num_layers)
    more = [
        role
        for role in draft.tensors
        if find_role(role, draft.roles) and not find_role(role, table)
    ]
    optional = {role.name for role in draft.roles if role.when == OPTIONAL}
    always = [role.name for role in table if role.when == ALWAYS and "{i}" not in role.name]
    less = [role for role in always if role in optional and role not in draft.tensors]
    for role, text in (
        (more[:1], "has"),
        (less[:1], "lacks"),
        ([] if more or less else list(draft.foreign_details[:1]), "states"),
    ):
        if role:
            yield diagnose(
                "SD716",
                where=where,
                message=f"this {draft.algorithm} draft ({draft.format}) {text} `{role[0]}`, which "
                "the runtime's layers do not allow",
                expected=f"the parts of {draft.algorithm}",
                found=f"{len(more)} tensors more, {len(less)} less",
            )


def activation_not_served(decoder: Decoder | None, source: str) -> Iterator[Diagnostic]:
    """Yield SD716 for layers with an activation that the runtime does not compute.

    Args:
        decoder: of a target or a draft; None: not served for another reason.
        source: as the user wrote it.
    """
    if decoder is not None and decoder.hidden_act not in HIDDEN_ACTS:
        yield diagnose(
            "SD716",
            where=f"{source}/config.json#",
            message=f"layers with activation `{decoder.hidden_act}` are not served",
            expected=" or ".join(HIDDEN_ACTS),
            found=decoder.hidden_act,
        )


def quantised_not_served(
    facts: TargetCheckpoint | DraftCheckpoint, source: str
) -> Iterator[Diagnostic]:
    """Yield SD716 when weights are stored quantised, which only other engines compute with."""
    found = [ref for ref in facts.tensors.values() if ref.dtype in QUANTISED_DTYPES]
    found = [ref for ref in found if len(ref.shape) > 1]  # masks and maps are vectors
    if found:
        yield diagnose(
            "SD716",
            where=f"{source}/{tensor_place(found[0])}",
            message=f"{len(found)} weights are stored quantised, such as `{found[0].key}`; only "
            "plain ones are served",
            expected=" or ".join(WEIGHT_DTYPES),
            found=found[0].dtype,
        )


def _kind(draft: DraftCheckpoint) -> str:
    """Return what stands in the way, from the reader's details."""
    details = draft.details
    reasons = []
    layers = details.get("num_prediction_layers")
    if isinstance(layers, int) and layers > 1:
        reasons.append(f"{layers} prediction layers")
    if details.get("has_output_gate") is True:
        reasons.append("gated attention")
    elif details.get("attention") not in (None, "grouped-query"):
        reasons.append(f"{details['attention']} attention")
    experts = details.get("num_experts")
    if isinstance(experts, int) and experts > 0:
        reasons.append(f"{experts} experts")
    order = details.get("concat_order")
    if order not in (None, "embedding, hidden"):
        reasons.append(f"input order `{order}`")
    if reasons:
        return ", ".join(reasons)
    model_type = draft.config.get("model_type")
    return f"layers of type `{model_type}`" if model_type else "layers of another family"
