"""Runtime settings: built whole from a manifest and what the user gave, each with its origin."""

from runtime.config.anchor import force_anchor
from runtime.config.resolve import resolve_config
from runtime.config.speculation import draft_width
from runtime.config.values import (
    DEFAULT_RANK_TIMEOUT_S,
    DRAFT_PROPOSERS,
    DTYPES,
    LengthMode,
    LoadFormat,
    Overrides,
    ProposerName,
    RuntimeConfig,
    dtype_name,
)

__all__ = [
    "DEFAULT_RANK_TIMEOUT_S",
    "DRAFT_PROPOSERS",
    "DTYPES",
    "LengthMode",
    "LoadFormat",
    "Overrides",
    "ProposerName",
    "RuntimeConfig",
    "draft_width",
    "dtype_name",
    "force_anchor",
    "resolve_config",
]
