"""Findings on prediction layers as a part: what is missing, experts, promised against stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from specctl.checkpoint import Checkpoint, tensor_place
from specctl.contract.findings import Findings
from specctl.formats.assemble import main_file
from specctl.formats.mtp.config import LayerCount
from specctl.formats.mtp.part import MtpPart
from specctl.formats.mtp.style import LayerStyle, expert_indexes, has_stem, required_stems
from specctl.formats.names import Matched


def report_required(
    part: MtpPart,
    style: LayerStyle,
    matched: Matched,
    findings: Findings,
    *,
    checkpoint: Checkpoint,
) -> None:
    """Report SD501 for what a part of this family and kind must have and lacks."""
    stored = matched.tensors
    for role in (*_required(part, style), *_unpaired(stored)):
        if role in stored or has_stem(stored, role.removesuffix(".weight")):
            continue
        key = part.key_of(role) or role
        findings.add(
            "SD501",
            where=f"{main_file(checkpoint)}::{key}",
            message=f"`{key}` is not stored; the prediction layer needs it",
            expected=f"`{key}`",
            found="nothing",
        )


def _required(part: MtpPart, style: LayerStyle) -> list[str]:
    free = ("embedding", "head", *part.family.optional)
    around = [role for role, _ in part.family.names if role not in free]
    several = part.num_fused > 1
    required: list[str] = []
    for role, template in part.family.names:
        if role not in around:
            continue
        if several and "{i}" in template:
            required += [f"layers.{k}.{role}" for k in _places(part, role)]
        else:
            required.append(role)
    if part.family.block_style == "llama":
        inside = required_stems(style)
        for k in range(len(part.indexes)):
            required += [f"layers.{k}.{name}" for name in ("input_norm", "post_attention_norm")]
            required += [f"layers.{k}.{stem}.weight" for stem in inside]
    return required


def _unpaired(stored: Collection[str]) -> list[str]:
    """Return the norm of queries or keys that is not stored beside the other one."""
    pairs = (("q_norm", "k_norm"), ("k_norm", "q_norm"))
    return [
        role.removesuffix(here) + other
        for role in stored
        for here, other in pairs
        if role.endswith(f".{here}") and role.removesuffix(here) + other not in stored
    ]


def _places(part: MtpPart, role: str) -> Collection[int]:
    """Return the layers that must hold a role; sub-layers share what the first and last have."""
    if part.family.block_style == "llama" or part.num_fused == len(part.indexes):
        return range(len(part.indexes))
    found = {int(name.split(".")[1]) for name in part.roles.values() if name.endswith(f".{role}")}
    return found or {0}


def report_experts(
    part: MtpPart,
    style: LayerStyle,
    matched: Matched,
    findings: Findings,
    sizes: Mapping[str, int],
) -> None:
    """Report experts that are missing (SD325) or of another shape than the config's (SD503).

    Args:
        part: the layers.
        style: their kind; only experts stored one by one are looked at here.
        matched: tensors by role.
        findings: receives the findings.
        sizes: `H` and `Ie`, where the config states them.
    """
    if style.mlp != "experts":
        return
    table = expert_indexes(matched.tensors)
    for (layer, name), found in table.items():
        count = max(len(indexes) for (at, _), indexes in table.items() if at == layer)
        if found != tuple(range(count)):
            absent = sorted(set(range(max(count, found[-1] + 1))) - set(found))
            key = part.key_of(f"layers.{layer}.mlp.experts.{absent[0]}.{name}_proj.weight")
            findings.add(
                "SD325",
                where="tensor names",
                message=f"expert {absent[0]} of {count} has no `{key}`",
                expected=f"{count} experts from 0 on",
                found=f"{len(found)} of them",
            )
    _report_expert_shapes(table, matched, findings, sizes)


def _report_expert_shapes(
    table: Mapping[tuple[int, str], tuple[int, ...]],
    matched: Matched,
    findings: Findings,
    sizes: Mapping[str, int],
) -> None:
    inner, hidden = sizes.get("Ie"), sizes.get("H")
    if inner is None or hidden is None:
        return
    for (layer, name), found in table.items():
        wanted = (hidden, inner) if name == "down" else (inner, hidden)
        roles = (f"layers.{layer}.mlp.experts.{index}.{name}_proj.weight" for index in found)
        stored = (matched.tensors.get(role) for role in roles)
        wrong = [ref for ref in stored if ref is not None and ref.shape != wanted]
        if wrong:
            more = f", as {len(wrong) - 1} more are" if wrong[1:] else ""
            findings.add(
                "SD503",
                where=tensor_place(wrong[0]),
                message=f"`{wrong[0].key}` is {list(wrong[0].shape)}{more}; the config gives "
                f"{list(wanted)}",
                expected=list(wanted),
                found=list(wrong[0].shape),
            )


def report_counts(
    part: MtpPart, count: LayerCount | None, findings: Findings, *, is_promised: bool
) -> None:
    """Report SD310 or SD326 when the config does not say how many layers are stored.

    Args:
        part: the stored layers.
        count: what the config says, None for a family without such a field.
        findings: receives the findings.
        is_promised: an engine looks at the field, so that an absent one matters.
    """
    if count is None or not part.roles:
        return
    stored = part.num_layers
    if not count.stated:
        if is_promised:
            findings.add(
                "SD326",
                where=count.field,
                message=f"{stored} prediction layers are stored and the config promises none",
                expected=stored,
                found="nothing" if count.stated is None else count.stated,
            )
        return
    if count.stated != stored:
        name = count.field.rpartition("/")[2]
        findings.add(
            "SD310",
            where=count.field,
            message=f"`{name}` is {count.stated} and the file holds {stored}",
            expected=stored,
            found=count.stated,
        )
