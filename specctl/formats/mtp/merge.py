"""What changes in a target when a slice of prediction layers is put back into it.

Invariants: only tensors that the slice holds are replaced; a key keeps the spelling, the root, the
layer index and the expert form that the target has, so that putting back what was taken out gives
the same bytes. Nothing is read and nothing is written here; `specctl.convert` does both.
*Source:* Speculators 0.9 `stitch-mtp` does the same for Qwen's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.draft import DraftCheckpoint
from specctl.formats.mtp.config import count_pointer
from specctl.formats.mtp.expert_forms import with_experts
from specctl.formats.mtp.families import BY_NAME, DEEPSEEK, QWEN, SPECULATORS
from specctl.formats.mtp.family import MtpFamily
from specctl.formats.mtp.naming import BORROWED, named, role_names
from specctl.formats.mtp.part import MtpPart, find_part
from specctl.formats.written import TensorSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """The change to a target.

    Args:
        tensors: key in the target -> where its bytes come from.
        replaced: those of the keys that the target has already; the others are added.
        count_pointer: config field that must say how many layers there are, None for a family
            without one.
        count: its value.
        left_out: roles of copies that the target has no place for and that are its own matrices.
        diagnostics: SD507 for a copy that is left out, SD611 for layers that do not fit.
    """

    tensors: Mapping[str, TensorSource]
    replaced: tuple[str, ...]
    count_pointer: str | None
    count: int
    left_out: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]


def merge(
    draft: DraftCheckpoint,
    target: Checkpoint,
    *,
    depth: int | None,
    is_copy: Callable[[str], bool],
) -> Merge:
    """Return what to change in a target so that it holds the draft's layers.

    Args:
        draft: prediction layers as read, alone or out of another target.
        target: the opened target.
        depth: layers of the target, for a family that numbers on from them.
        is_copy: tells of a role whether its bytes are those of the target's embedding or head.
    """
    part = _present(draft, target)
    family = part.family if part is not None else _family_of(draft)
    layers, places = _num_layers(draft), _num_places(draft)
    indexes = _indexes(family, part, depth, places)
    if family is None or indexes is None or len(indexes) < places:
        return _refused(draft, part, layers)
    root = part.root if part is not None else _root(family, target)
    has = frozenset() if part is None else frozenset(part.roles.values())
    sources = with_experts(draft.tensors, is_fused=_is_fused(draft, has))
    spare = (role for role in sources if _is_borrowed(role) and role not in has)
    left_out = [role for role in spare if is_copy(role)]
    kept = {role: source for role, source in sources.items() if role not in left_out}
    tensors = _in_place(draft, family, part, kept, root=root, indexes=indexes)
    pointer = count_pointer(target.config or {}, family.count_fields)
    findings = [*_shape_findings(tensors, target), *_left_out(draft, left_out)]
    return Merge(
        tensors=tensors,
        replaced=tuple(sorted(key for key in tensors if key in target.tensors)),
        count_pointer=pointer,
        count=layers,
        left_out=tuple(left_out),
        diagnostics=tuple(findings),
    )


def _in_place(
    draft: DraftCheckpoint,
    family: MtpFamily,
    part: MtpPart | None,
    sources: Mapping[str, TensorSource],
    *,
    root: str,
    indexes: tuple[int, ...],
) -> dict[str, TensorSource]:
    """Return key -> source: the target's key of a role, the slice's own, or the family's."""
    present = {} if part is None else {role: key for key, role in part.roles.items()}
    if draft.format == family.name and not family.is_after_trunk:
        prefix = str(draft.details.get("key_prefix", ""))
        own = {role: root + ref.key.removeprefix(prefix) for role, ref in draft.tensors.items()}
        present = {**own, **present}
    others = {role: source for role, source in sources.items() if role not in present}
    tensors = {present[role]: source for role, source in sources.items() if role in present}
    return {**tensors, **named(family, others, root=root, indexes=indexes)}


def _present(draft: DraftCheckpoint, target: Checkpoint) -> MtpPart | None:
    """Return the target's own layers of the family that the draft belongs to."""
    own = _family_of(draft)
    if own is None:
        return None
    part = find_part(own, target.tensors)
    return part if part is not None and part.indexes else None


def _family_of(draft: DraftCheckpoint) -> MtpFamily | None:
    if draft.format != SPECULATORS.name:
        return BY_NAME.get(draft.format)
    return DEEPSEEK if draft.decoder is not None else QWEN


def _num_layers(draft: DraftCheckpoint) -> int:
    count = draft.details.get("num_prediction_layers")
    return count if isinstance(count, int) else 1


def _num_places(draft: DraftCheckpoint) -> int:
    """Return the layers, or sub-layers, that the draft's tensors lie in."""
    return 1 + max((role_names(role)[0] or 0 for role in draft.tensors), default=0)


def _indexes(
    family: MtpFamily | None, part: MtpPart | None, depth: int | None, layers: int
) -> tuple[int, ...] | None:
    if part is not None:
        return part.indexes
    if family is None:
        return None
    if not family.is_after_trunk:
        return tuple(range(layers))
    return None if depth is None else tuple(range(depth, depth + layers))


def _root(family: MtpFamily, target: Checkpoint) -> str:
    """Return the root that the target's own layers have, for a family that numbers on from them."""
    if not family.is_after_trunk:
        return family.roots[0]
    mark = "layers.0."
    found = (
        root for root in family.roots if any(k.startswith(root + mark) for k in target.tensors)
    )
    return next(found, family.roots[0])


def _is_fused(draft: DraftCheckpoint, has: frozenset[str]) -> bool:
    """Tell the form of experts to write: the target's, else the draft's own."""
    roles = has or frozenset(draft.tensors)
    return any(role.endswith("mlp.experts.gate_up_proj") for role in roles)


def _is_borrowed(role: str) -> bool:
    return role_names(role)[1] in BORROWED


def _shape_findings(tensors: Mapping[str, TensorSource], target: Checkpoint) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    for key, source in tensors.items():
        entry = target.tensors.get(key)
        if entry is not None and entry.shape != source.out_shape:
            found.append(
                diagnose(
                    "SD611",
                    where=entry.describe(),
                    message=f"`{key}` is {list(entry.shape)} in the target and "
                    f"{list(source.out_shape)} in the layers",
                    expected=list(entry.shape),
                    found=list(source.out_shape),
                )
            )
    return found


def _left_out(draft: DraftCheckpoint, roles: list[str]) -> list[Diagnostic]:
    return [
        diagnose(
            "SD507",
            where=f"{draft.tensors[role].file}::{draft.tensors[role].key}",
            message="left out: it equals the target's own matrix, which has no copy to replace",
        )
        for role in roles
    ]


def _refused(draft: DraftCheckpoint, part: MtpPart | None, layers: int) -> Merge:
    room = 0 if part is None else len(part.indexes)
    finding = diagnose(
        "SD611",
        where="config.json#",
        message=f"{layers} layers in the layout `{draft.format}` have no place in this target",
        expected="a target of the same family, its number of layers known",
        found=f"room for {room}" if room else "no layers of this family",
    )
    return Merge(
        tensors={},
        replaced=(),
        count_pointer=None,
        count=layers,
        left_out=(),
        diagnostics=(finding,),
    )
