"""The resolved settings of a server, each with where its value comes from."""

from __future__ import annotations

from dataclasses import asdict, fields

import msgspec
import torch

from runtime.config import RuntimeConfig, dtype_name
from runtime.engine.device_rounds import round_menu
from runtime.graphs.capture import GraphReport
from runtime.kernels.gemm_table import gemm_table_digest
from specctl.contract.manifest import Manifest

_NOT_SETTINGS = ("origins", "diagnostics")


def info_object(
    config: RuntimeConfig,
    manifest: Manifest,
    server: dict[str, dict[str, object]],
    *,
    graphs: GraphReport,
) -> dict[str, object]:
    """Build the document of `/info`.

    Args:
        config: settings of the engine.
        manifest: the served manifest.
        server: settings of the HTTP side, each with value and origin.
        graphs: captured graphs and what they cost.
    """
    settings = {
        item.name: {
            "value": _plain(getattr(config, item.name)),
            "origin": config.origins.get(item.name, "derived"),
        }
        for item in fields(config)
        if item.name not in _NOT_SETTINGS
    }
    return {
        "settings": settings,
        "server": server,
        "manifest": {
            "fingerprint": manifest.fingerprint,
            "specctl_version": manifest.specctl_version,
            "schema_version": manifest.schema_version,
            "target": manifest.target.source,
            "draft": manifest.draft.source if manifest.draft else None,
            "verification": manifest.sampling.verification,
        },
        "kernels": {"gemm_table": gemm_table_digest()},
        "graphs": asdict(graphs),
        "round_sizes": asdict(round_menu(config)),
        "diagnostics": [msgspec.to_builtins(item) for item in config.diagnostics],
    }


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)
