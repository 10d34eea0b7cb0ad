"""Runtime settings: built whole from a manifest and what the user gave, each with its origin."""

from runtime.config.resolve import resolve_config
from runtime.config.values import (
    DEVICE_DTYPES,
    DRAFT_PROPOSERS,
    DTYPES,
    ConfigOrigin,
    Overrides,
    ProposerName,
    RuntimeConfig,
)

__all__ = [
    "DEVICE_DTYPES",
    "DRAFT_PROPOSERS",
    "DTYPES",
    "ConfigOrigin",
    "Overrides",
    "ProposerName",
    "RuntimeConfig",
    "resolve_config",
]
