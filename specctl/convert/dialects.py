"""Names that `convert --to` takes: every format that can be written, and aliases by algorithm.

Invariants: a name gives exactly one format for an algorithm, or SD602 that lists what it gives for
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.draft import Algorithm
from specctl.formats.format import Format
from specctl.formats.registry import BY_NAME, DRAFT_FORMATS

GGUF_MAP = "gguf-map"

_SPECULATORS: Mapping[Algorithm, str] = MappingProxyType(
    {
        "eagle": "speculators-eagle",
        "eagle3": "speculators-eagle3",
        "peagle": "speculators-peagle",
        "dflash": "speculators-dflash",
        "dflash2": "speculators-dflash2",
        "dspark": "speculators-dspark",
        "xpress": "speculators-xpress",
        "mtp": "speculators-mtp",
    }
)

ALIASES: Mapping[str, Mapping[Algorithm, str]] = MappingProxyType(
    {
        "speculators": _SPECULATORS,
        "eagle3": {"eagle3": "safeailab-eagle3"},
        "specforge": {
            "eagle3": "specforge-eagle3",
            "peagle": "peagle",
            "dflash": "zlab-dflash",
            "dflash2": "zlab-dflash2",
            "dspark": "deepspec-dspark",
        },
        "modelopt": {"eagle3": "modelopt-eagle3", "dspark": "modelopt-dspark"},
        "dspark": {"dspark": "deepspec-dspark"},
        "dflash": {"dflash": "zlab-dflash", "dflash2": "zlab-dflash2"},
        # What each engine reads without a converter of its own.
        "sglang": {
            "eagle": "eagle",
            "eagle3": "specforge-eagle3",
            "dflash": "zlab-dflash",
            "dflash2": "zlab-dflash2",
            "dspark": "deepspec-dspark",
        },
        "vllm": {**_SPECULATORS, "eagle": "eagle"},
    }
)
"""Alias -> algorithm -> format."""


def writable_formats() -> tuple[Format, ...]:
    """Return the draft formats that can be written, in the registry's order."""
    return tuple(entry for entry in DRAFT_FORMATS if entry.write is not None)


def dialect_names() -> tuple[str, ...]:
    """Return every name that `--to` takes."""
    return (*ALIASES, *(entry.name for entry in writable_formats()), GGUF_MAP)


def dialect_lines() -> Iterator[str]:
    """Yield a line for every name that `--to` takes, with what it writes."""
    width = max(map(len, dialect_names())) + 2
    for name, formats in ALIASES.items():
        yield f"{name:<{width}}by algorithm: {', '.join(dict.fromkeys(formats.values()))}"
    for entry in writable_formats():
        yield f"{entry.name:<{width}}{entry.title}"
    yield f"{GGUF_MAP:<{width}}a JSON file: vocabulary map and captured layers, for llama.cpp"


def find_dialect(name: str, algorithm: Algorithm) -> Format:
    """Return the format that a name means for an algorithm.

    Raises:
        DiagnosticError: SD602 when the name is unknown, or means no format that can be written for
            this algorithm.
    """
    entry = BY_NAME.get(ALIASES[name].get(algorithm, "") if name in ALIASES else name)
    if entry is not None and entry.write is not None and entry.algorithm == algorithm:
        return entry
    fitting = [alias for alias, formats in ALIASES.items() if algorithm in formats]
    fitting += [e.name for e in writable_formats() if e.algorithm == algorithm]
    if name not in dialect_names():
        message = f"`{name}` is no dialect"
    else:
        message = f"`{name}` does not hold drafts of algorithm `{algorithm}`"
    raise DiagnosticError(
        diagnose(
            "SD602",
            where="--to",
            message=message,
            expected=", ".join(fitting) or "no dialect holds this algorithm",
            found=name,
        )
    )
