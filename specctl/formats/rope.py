"""Rotary facts from either spelling of a config.

*Source:* transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`
with the theta inside; both occur, and a file with both must agree (vLLM issue 51092). What each
kind needs is `modeling_rope_utils` of transformers, which only warns of a number that is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from specctl.contract.manifest import Rope
from specctl.formats.fields import Fields

_NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        "yarn": ("factor",),
        "dynamic": (),  # a factor, or Hunyuan's alpha
        "longrope": (),
        "su": (),
        "mrope": (),
        "ntk": (),
        "proportional": (),
        "deepseek_yarn": ("factor",),
        "deepseek_llama_scaling": (),
    }
)
"""Kinds of rotary scaling -> numbers without which they are none."""
_ABOVE_ZERO = (*_NEEDED["llama3"], "attention_factor", "beta_fast", "beta_slow")
_OF_A_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "long_factor",
    "short_factor",
    "beta_fast",
    "beta_slow",
)

# Text turns the same with and without them; another key of a section without a kind is SD211.
_BESIDE_NO_SCALING = ("mrope_section", "mrope_interleaved", "original_max_position_embeddings")


def read_rope(fields: Fields, path: str) -> Rope | None:
    """Return the rotary facts.

    None when they are malformed (SD206, SD207) or contradict (SD208): a model that turns its heads
    by other numbers than it was trained with still gives text.
    """
    nested = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling")
    if nested is not None and not _is_flat(nested):
        return None
    if not all(_is_whole(part) for part in (fields, nested, scaling) if part is not None):
        return None
    parts = [part for part in (nested, scaling) if part is not None]
    if not all(map(_has_one_kind, parts)) or not _agree(fields, nested, scaling):
        return None
    if not all(map(_has_numbers, parts)):
        return None
    source = nested or scaling
    theta = _theta(fields, nested, scaling, path)
    if theta is None:
        return None
    if source is None:
        return Rope(theta=theta)
    kind = _kind(source)
    fields.findings.read(path, source.where("rope_type"))
    if kind == "default":
        for key in _BESIDE_NO_SCALING:
            source.raw(key)
        return Rope(theta=theta)
    numbers = {
        key: source.raw(key)
        for key in source.data
        if key not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    }
    return Rope(theta=theta, kind=kind, parameters=_plain(numbers))


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


def _agree(fields: Fields, nested: Fields | None, scaling: Fields | None) -> bool:
    """Report SD208 for two sections that describe different rotary numbers."""
    if nested is None or scaling is None:
        return True
    if _kind(nested) != _kind(scaling):
        _conflict(fields, "rope_type", _kind(nested), _kind(scaling))
        return False
    for key in sorted(set(nested.data) & set(scaling.data) - {"rope_theta", "rope_type", "type"}):
        if nested.raw(key) != scaling.raw(key):
            _conflict(fields, key, nested.raw(key), scaling.raw(key))
            return False
    return True


def _has_one_kind(section: Fields) -> bool:
    """Report SD207 for an unknown kind, SD208 for two of them or for numbers of none."""
    new, old, kind = section.raw("rope_type"), section.raw("type"), _kind(section)
    if kind not in _NEEDED:
        section.findings.add(
            "SD207",
            where=section.where("rope_type" if new else "type"),
            message=f"`{kind}` is no kind of rotary scaling",
            expected=", ".join(_NEEDED),
            found=kind,
        )
        return False
    # transformers writes both keys, and turns Qwen's "mrope" into "default" in the new one only.
    if new and old and old != new and (old, new) != ("mrope", "default"):
        section.findings.add(
            "SD208",
            where=section.where("type"),
            message=f"`rope_type` is `{new}` and `type` beside it is `{old}`",
            expected="one value",
            found=f"{new} and {old}",
        )
        return False
    used = [key for key in _OF_A_SCALING if section.raw(key) not in (None, 1)]
    if kind == "default" and used:
        section.findings.add(
            "SD208",
            where=section.where(used[0]),
            message=f"`{used[0]}` is a number of a rotary scaling, and `rope_type` is "
            + ("absent" if new is None and old is None else "`default`"),
            expected="the kind that the numbers belong to, or no numbers",
            found=f"{', '.join(used)} without a kind",
        )
        return False
    return True


def _has_numbers(section: Fields) -> bool:
    """Report SD206 for a number that the kind lacks, SD207 for one that cannot be."""
    kind = _kind(section)
    if kind == "default":
        return True
    for key in _NEEDED[kind]:
        if not section.has(key):
            section.findings.add(
                "SD206",
                where=section.where(key),
                message=f"rotary scaling `{kind}` needs `{key}`",
                expected=f"`{key}`",
                found="nothing",
            )
            return False
    if any(section.has(key) and section.number(key) is None for key in _ABOVE_ZERO):
        return False
    low, high = section.raw("low_freq_factor"), section.raw("high_freq_factor")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low >= high:
        section.findings.add(
            "SD207",
            where=section.where("low_freq_factor"),
            message=f"`low_freq_factor` {low} is not below `high_freq_factor` {high}",
            expected=f"below {high}",
            found=low,
        )
        return False
    return True


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
