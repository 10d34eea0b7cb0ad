"""Rotary facts from either spelling of a config.

*Source:* transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`
with the theta inside; both occur, and a file with both must agree (vLLM issue 51092).
"""

from __future__ import annotations

import sys

from specctl.contract.manifest import Rope
from specctl.formats.fields import Fields


def read_rope(fields: Fields, path: str) -> Rope | None:
    """Return the rotary facts, None when they are malformed (SD207) or contradict (SD208)."""
    nested = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling")
    if nested is not None and not _is_flat(nested):
        return None
    if not all(_is_whole(part) for part in (fields, nested, scaling) if part is not None):
        return None
    source = nested or scaling
    theta = _theta(fields, nested, scaling, path)
    if theta is None:
        return None
    if source is None:
        return Rope(theta=theta)
    if nested is not None and scaling is not None and _kind(nested) != _kind(scaling):
        _conflict(fields, "rope_type", _kind(nested), _kind(scaling))
        return None
    numbers = {
        key: source.raw(key)
        for key in source.data
        if key not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    }
    kind = _kind(source)
    fields.findings.read(path, source.where("rope_type"))
    return Rope(theta=theta, kind=kind, parameters={} if kind == "default" else _plain(numbers))


def _theta(
    fields: Fields, nested: Fields | None, scaling: Fields | None, path: str
) -> float | None:
    """Return theta from whichever object states it; ModelOpt puts it into `rope_scaling` too."""
    theta_path = f"{path}.theta"
    inner = [part for part in (nested, scaling) if part is not None and part.has("rope_theta")]
    if not inner:
        return fields.number("rope_theta", theta_path)
    theta = inner[0].number("rope_theta", theta_path)
    others = [*inner[1:], *([fields] if fields.has("rope_theta") else [])]
    for other in others:
        if other.number("rope_theta") != theta:
            _conflict(fields, "rope_theta", theta, other.raw("rope_theta"))
            return None
    return theta


def _is_whole(section: Fields) -> bool:
    """Report SD207 for a factor that leaves some dimensions unturned; none is read."""
    factor = section.raw("partial_rotary_factor")
    if factor is None or factor == 1:
        return True
    section.findings.add(
        "SD207",
        where=section.where("partial_rotary_factor"),
        message="`partial_rotary_factor` turns a part of each head; only whole heads are read",
        expected="1, or no such key",
        found=factor,
    )
    return False


def _kind(section: Fields) -> str:
    kind = section.raw("rope_type") or section.raw("type") or "default"
    return kind if isinstance(kind, str) else repr(kind)


def _is_flat(nested: Fields) -> bool:
    if not any(isinstance(value, dict) for value in nested.data.values()):
        return True
    nested.findings.add(
        "SD207",
        where=nested.where(""),
        message="`rope_parameters` holds one entry per layer type; only one for all layers is read",
        expected="rope_type, rope_theta and numbers",
        found=", ".join(sorted(nested.data)),
    )
    return False


def _plain(
    numbers: dict[str, object],
) -> dict[str, float | int | bool | str | list[float] | None]:
    result: dict[str, float | int | bool | str | list[float] | None] = {}
    for key, value in numbers.items():
        if value is None or isinstance(value, (bool, int, float, str)):
            result[key] = value
        elif isinstance(value, list) and all(
            isinstance(item, (int, float))
            and not isinstance(item, bool)
            and abs(item) <= sys.float_info.max
            for item in value
        ):
            result[key] = [float(item) for item in value]
        else:
            result[key] = repr(value)
    return result


def _conflict(fields: Fields, key: str, nested: object, other: object) -> None:
    fields.findings.add(
        "SD208",
        where=fields.where("rope_parameters") + f"/{key}",
        message=f"`{key}` is {nested} in one place of the rotary numbers and {other} in another",
        expected="one value",
        found=f"{nested} and {other}",
    )
