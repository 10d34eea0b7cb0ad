"""Facts that `normalize --set NAME=VALUE` states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from specctl import formats
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.draft import DraftCheckpoint, block_geometry

TARGET_NAME = "target_name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One fact that can be set.

    Args:
        expected: what its value looks like.
        accepts: tells whether a JSON value is one.
        apply: returns the draft with the fact.
        holds: returns the fact of a draft that was read, to see that the dialect can hold it.
        settles: codes of findings that the fact answers.
    """

    expected: str
    accepts: Callable[[Any], bool]
    apply: Callable[[DraftCheckpoint, Any], DraftCheckpoint]
    holds: Callable[[DraftCheckpoint], object]
    settles: tuple[str, ...] = ()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _anchor(draft: DraftCheckpoint, value: bool) -> DraftCheckpoint:
    size, count = draft.draft_block_size, draft.declared_num_speculative_tokens
    if size is None:
        return replace(draft, sample_from_anchor=value)
    geometry = block_geometry(
        draft_block_size=size, sample_from_anchor=value, num_speculative_tokens=count
    )
    return replace(draft, sample_from_anchor=value, geometry=geometry)


def _numbering(draft: DraftCheckpoint, value: Any) -> DraftCheckpoint:
    return formats.with_given(draft, aux_numbering=value)


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "num_speculative_tokens": Setting(
            expected="an integer of at least 1",
            accepts=_is_count,
            apply=lambda draft, value: formats.with_given(draft, num_speculative_tokens=value),
            holds=lambda draft: draft.geometry and draft.geometry.num_speculative_tokens,
            settles=("SD301", "SD302"),
        ),
        "aux_layer_ids": Setting(
            expected="a list of 0-based layers, output of that layer, such as [1,14,26]",
            accepts=_is_ids,
            apply=lambda draft, value: formats.with_given(draft, aux_layer_ids=tuple(value)),
            holds=lambda draft: draft.aux_layer_ids,
            settles=("SD303", "SD306", "SD304", "SD308", "SD324"),
        ),
        "aux_numbering": Setting(
            expected="output or boundary",
            accepts=lambda value: value in ("output", "boundary"),
            apply=_numbering,
            holds=lambda draft: draft.aux_layer_ids,
            settles=("SD303",),
        ),
        "norm_before_residual": Setting(
            expected="true or false",
            accepts=lambda value: isinstance(value, bool),
            apply=lambda draft, value: replace(draft, has_norm_before_residual=value),
            holds=lambda draft: draft.has_norm_before_residual,
            settles=("SD311",),
        ),
        "sample_from_anchor": Setting(
            expected="true or false",
            accepts=lambda value: isinstance(value, bool),
            apply=_anchor,
            holds=lambda draft: draft.sample_from_anchor,
            settles=("SD307", "SD302"),
        ),
        "mask_token_id": Setting(
            expected="an integer of at least 0",
            accepts=_is_id,
            apply=lambda draft, value: replace(draft, mask_token_id=value),
            holds=lambda draft: draft.mask_token_id,
            settles=("SD314",),
        ),
        TARGET_NAME: Setting(
            expected="a hub id",
            accepts=lambda value: isinstance(value, str) and bool(value),
            apply=lambda draft, value: replace(draft, target_name=value),
            holds=lambda draft: draft.target_name,
            settles=("SD209",),
        ),
    }
)


def parse_settings(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return name -> value of `NAME=VALUE` texts; a value is JSON, or a plain word.

    Raises:
        DiagnosticError: SD609.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value_text = text.partition("=")
        setting = SETTINGS.get(name)
        if setting is None or not equals:
            raise _wrong(f"`{text}` sets no known fact", ", ".join(SETTINGS), name or text)
        value = _value(value_text)
        if not setting.accepts(value):
            raise _wrong(f"`{name}` is not {setting.expected}", setting.expected, value_text)
        found[name] = value
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _wrong(message: str, expected: str, found: str) -> DiagnosticError:
    return DiagnosticError(
        diagnose("SD609", where="--set", message=message, expected=expected, found=found)
    )


def apply_settings(draft: DraftCheckpoint, settings: Mapping[str, Any]) -> DraftCheckpoint:
    """Return the draft with the facts set, without the findings that they answer."""
    for name, value in settings.items():
        draft = SETTINGS[name].apply(draft, value)
    answered = {code for name in settings for code in SETTINGS[name].settles}
    kept = tuple(d for d in draft.diagnostics if d.code not in answered or d.where.startswith("--"))
    return replace(draft, diagnostics=kept)


def check_settings(
    settings: Mapping[str, Any], wanted: DraftCheckpoint, found: DraftCheckpoint
) -> None:
    """Raise SD609 for a setting that the written draft does not hold: the dialect has no field.

    Args:
        settings: facts that were set.
        wanted: the draft with them.
        found: the written draft, read again.
    """
    for name in settings:
        expected, read = SETTINGS[name].holds(wanted), SETTINGS[name].holds(found)
        if expected != read:
            raise DiagnosticError(
                diagnose(
                    "SD609",
                    where="--set",
                    message=f"`{found.format}` has no field for `{name}`",
                    expected=expected,
                    found="nothing" if read is None else read,
                    help="Give the fact where it is used, such as to `specctl manifest`, or choose "
                    "a dialect that states it",
                )
            )
