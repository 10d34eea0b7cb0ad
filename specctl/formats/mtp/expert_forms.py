"""Experts in two forms: three matrices for each, or two stacks for all.

The stacks are `gate_up_proj` [E, 2*Ie, H], in each expert gate rows before up rows, and `down_proj`
[E, H, Ie]. Either form is a rearrangement of whole rows, so bytes are only copied.
*Source:* transformers 5.24 expert modules; Speculators 0.9 fuses and unfuses the same way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specctl.contract.manifest import TensorRef
from specctl.formats.written import Copy, Joined, Span, TensorSource

_ONE = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d{1,5})\.(gate|up|down)_proj\.weight")
_STACK = re.compile(r"(layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")


def with_experts(tensors: Mapping[str, TensorRef], *, is_fused: bool) -> dict[str, TensorSource]:
    """Return role -> source with the experts in one form; everything else is copied.

    Args:
        tensors: role -> stored tensor, experts complete (SD325 is reported by the reader).
        is_fused: stack them, else take them apart.
    """
    return _stacked(tensors) if is_fused else _apart(tensors)


def _stacked(tensors: Mapping[str, TensorRef]) -> dict[str, TensorSource]:
    groups: dict[str, dict[tuple[int, str], TensorRef]] = {}
    sources: dict[str, TensorSource] = {}
    for role, ref in tensors.items():
        found = _ONE.fullmatch(role)
        if found is None:
            sources[role] = Copy(ref=ref)
        else:
            groups.setdefault(found[1], {})[int(found[2]), found[3]] = ref
    for prefix, parts in groups.items():
        count = 1 + max(index for index, _ in parts)
        if not _is_stackable(parts, count):  # SD325 and SD503 say why; nothing is lost here
            sources |= {
                f"{prefix}.{index}.{name}_proj.weight": Copy(ref=ref)
                for (index, name), ref in parts.items()
            }
            continue
        pairs = [parts[index, name] for index in range(count) for name in ("gate", "up")]
        downs = [parts[index, "down"] for index in range(count)]
        sources[f"{prefix}.gate_up_proj"] = Joined(parts=tuple(pairs), leading=count)
        sources[f"{prefix}.down_proj"] = Joined(parts=tuple(downs), leading=count)
    return sources


def _is_stackable(parts: Mapping[tuple[int, str], TensorRef], count: int) -> bool:
    """Tell whether every expert has its three matrices, alike in all experts."""
    if len(parts) != 3 * count:
        return False
    kinds = {(name == "down", ref.dtype, ref.shape) for (_, name), ref in parts.items()}
    return len(kinds) == 2


def _apart(tensors: Mapping[str, TensorRef]) -> dict[str, TensorSource]:
    sources: dict[str, TensorSource] = {}
    for role, ref in tensors.items():
        found = _STACK.fullmatch(role)
        if found is None or len(ref.shape) != 3:
            sources[role] = Copy(ref=ref)
            continue
        count, rows, columns = ref.shape
        names = ("gate", "up") if found[2] == "gate_up" else ("down",)
        step = (ref.end - ref.begin) // count // len(names)
        for index in range(count):
            for place, name in enumerate(names):
                sources[f"{found[1]}.{index}.{name}_proj.weight"] = Span(
                    ref=ref,
                    begin_bytes=(index * len(names) + place) * step,
                    shape=(rows // len(names), columns),
                )
    return sources
