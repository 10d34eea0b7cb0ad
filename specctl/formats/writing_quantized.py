"""Carry a draft's `quantization_config` into another dialect, with its module names renamed.

Scales travel with their weights by role; what says how to read them is one config section whose
lists name modules as the source spells them. A name that is no plain module name (a pattern) is
kept when no module changes its name, and is SD602 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from specctl.checkpoint.config_sections import QUANTIZATION_SECTIONS
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG, QUANTIZATION
from specctl.draft import DraftCheckpoint
from specctl.formats.written import Copy, WriteRequest, Written, unable

_PATTERN_SIGNS = frozenset("*^$\\[(|?")


def carrying(write: Callable[[WriteRequest], Written]) -> Callable[[WriteRequest], Written]:
    """Return the writer with the draft's quantisation carried into what it writes."""

    @wraps(write)
    def write_with_quantization(request: WriteRequest) -> Written:
        return with_quantization(request.draft, write(request))

    return write_with_quantization


def with_quantization(draft: DraftCheckpoint, written: Written) -> Written:
    """Return what was written with the sections that say how weights are stored.

    `hf_quant_config.json` goes along when no module changes its name: its lists are not rewritten.
    """
    sections = {key: draft.config[key] for key in QUANTIZATION_SECTIONS if key in draft.config}
    if not written.config:
        return written
    renamed = renamed_modules(written)
    is_same = all(old == new for old, new in renamed.items())
    problems: list[Diagnostic] = []
    config: dict[str, Any] = dict(written.config)
    for key, section in sections.items():
        config[key] = _rewritten(section, renamed, problems, f"{CONFIG}#/{key}", is_same=is_same)
    files = dict(written.copied_files)
    if is_same:
        files[QUANTIZATION] = QUANTIZATION
    return Written(
        config=config,
        tensors=written.tensors,
        diagnostics=(*written.diagnostics, *problems),
        copied_files=files,
    )


def renamed_modules(written: Written) -> Mapping[str, str]:
    """Return module of the source -> module in the output, for every copied weight."""
    found: dict[str, str] = {}
    for key, source in written.tensors.items():
        if isinstance(source, Copy) and source.origin == "draft":
            old, _, part = source.ref.key.rpartition(".")
            new, _, same = key.rpartition(".")
            if old and part == same:
                found[old] = new
    return found


def _rewritten(
    value: object,
    renamed: Mapping[str, str],
    problems: list[Diagnostic],
    where: str,
    *,
    is_same: bool,
) -> object:
    """Return a config value with the module names in it as the output spells them."""
    if isinstance(value, Mapping):
        return {
            _rewritten(key, renamed, problems, where, is_same=is_same): _rewritten(
                item, renamed, problems, f"{where}/{key}", is_same=is_same
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_rewritten(item, renamed, problems, where, is_same=is_same) for item in value]
    if is_same or not isinstance(value, str):
        return value
    if "." in value and _PATTERN_SIGNS & set(value):
        problems.append(
            unable(
                where=where,
                message=f"`{value}` is a pattern over module names, and the names change",
                expected="plain module names",
                found=value,
            )
        )
        return value
    return _renamed(value, renamed)


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    """Return a module's name in the output; a fused or outer module follows its parts."""
    if name in renamed:
        return renamed[name]
    inside = {
        new[: len(new) - (len(old) - len(name))]
        for old, new in renamed.items()
        if old.startswith(f"{name}.") and new.endswith(old[len(name) :])
    }
    if len(inside) == 1:
        return inside.pop()
    parent, dot, last = name.rpartition(".")
    if not dot:
        return name
    outer = _renamed(parent, renamed)
    return f"{outer}.{last}" if outer != parent else name
