"""Read and write manifests: YAML (or JSON) text <-> `Manifest`, strict in both directions.

Unknown keys name their nearest match; a value of the wrong type names its path; duplicate keys are
refused (YAML loaders keep the last one silently); facts that contradict each other or lack an
origin are refused. `parse_manifest(dump_manifest(m)) == m` for manifests that pass their checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from specctl.contract.consistency import check_manifest
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.digests import resolve_source, verify_digests
from specctl.contract.fingerprint import fingerprint
from specctl.contract.manifest import SCHEMA_VERSION, Manifest
from specctl.contract.tensor_places import verify_places

__all__ = [
    "dump_manifest",
    "fingerprint",
    "load_manifest",
    "manifest_json_schema",
    "parse_manifest",
    "resolve_source",
    "verify_digests",
    "verify_places",
]

_HEADS: Mapping[str, str] = {
    "target": "The model whose distribution defines correctness.",
    "draft": "The model that proposes; null: target only.",
    "geometry": "Widths of a round, in tokens.",
    "vocabulary": "Which target ids the draft can propose.",
    "sharing": "Where the draft's embedding and head come from.",
    "parallel": "Bytes that a stage split balances; tensor-parallel sizes that fit.",
    "graphs": "Batch sizes with a fixed-shape round.",
    "sampling": "How sampled requests are verified.",
    "diagnostics": "Warnings that were present when this file was written.",
    "fingerprint": "Digest over every fact that two processes must agree on.",
    "origins": "Where each fact comes from; the longest matching path counts.",
}


def load_manifest(path: str | Path) -> Manifest:
    """Return the manifest in a file; `.json` is read as JSON, anything else as YAML.

    Raises:
        DiagnosticError: SD701 (schema too new), SD703 (unreadable), SD704 (duplicate keys),
            SD705-SD707 (keys and types), SD708-SD711 (origins, contradictions, fingerprint).
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise DiagnosticError(
            diagnose(
                "SD703",
                where=f"{path}#",
                message=f"manifest cannot be read: {reason}",
                help="Name a file that `specctl manifest TARGET DRAFT -o manifest.yaml` wrote",
            )
        ) from error
    except UnicodeDecodeError as error:
        raise DiagnosticError(
            diagnose(
                "SD703",
                where=f"{path}#",
                message="manifest is not UTF-8 text",
                expected="UTF-8",
                found=f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
            )
        ) from error
    return parse_manifest(text, name=str(path), is_json=path.suffix == ".json")


def parse_manifest(text: str, *, name: str, is_json: bool = False) -> Manifest:
    """Return the manifest in a text; `name` is used for the places of diagnostics.

    Raises:
        DiagnosticError: as `load_manifest`.
    """
    from specctl.contract import strict, yaml_text

    value = yaml_text.parse(text, name=name, is_json=is_json)
    if not isinstance(value, dict):
        raise DiagnosticError(
            diagnose(
                "SD703",
                where=f"{name}#",
                message="the top level of a manifest is a mapping of sections",
                expected="a mapping",
                found=strict.describe_value(value),
            )
        )
    version = value.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise DiagnosticError(
            diagnose(
                "SD701",
                where=f"{name}#/schema_version",
                message=f"schema version {version} is newer than {SCHEMA_VERSION}",
                expected=f"at most {SCHEMA_VERSION}",
                found=version,
            )
        )
    manifest = strict.convert(value, Manifest, name=name)
    findings = check_manifest(manifest, name=name)
    if findings:
        raise DiagnosticError(findings)
    return manifest


def dump_manifest(manifest: Manifest, *, as_json: bool = False) -> str:
    """Return the manifest as YAML, sections in schema order, tensors and origins one per line.

    Args:
        manifest: any manifest.
        as_json: write indented JSON with the same keys instead.
    """
    if as_json:
        return msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode() + "\n"
    from specctl.contract import yaml_text

    values: dict[str, Any] = msgspec.to_builtins(manifest)
    values["origins"] = {
        path: {key: item for key, item in origin.items() if item is not None}
        for path, origin in values["origins"].items()
    }
    blocks: list[str] = []
    for section, value in values.items():
        if section in _HEADS:
            blocks.append(f"\n# {_HEADS[section]}\n")
        blocks.append(yaml_text.emit({section: _with_lines(value)}))
    return "".join(blocks)


def _with_lines(value: Any) -> Any:
    """Mark mappings of scalars below the first level to be written on one line."""
    from specctl.contract import yaml_text

    if isinstance(value, dict):
        return {
            key: yaml_text.one_line(item) if _is_record(item) else _with_lines(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [yaml_text.one_line(item) if _is_record(item) else item for item in value]
    return value


def _is_record(value: Any) -> bool:
    """Tell whether the value is a tensor, file, origin or diagnostic."""
    return isinstance(value, dict) and bool({"key", "file", "kind", "code"} & value.keys())


def manifest_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a manifest."""
    schema: dict[str, Any] = msgspec.json.schema(Manifest)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"specctl manifest, schema version {SCHEMA_VERSION}",
    }
    ordered: dict[str, Any] = json.loads(json.dumps(head | schema))
    return ordered
