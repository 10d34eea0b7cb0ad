"""Find the tokenizer.json that a source means, or that of the manifest in the working directory."""

from __future__ import annotations

from pathlib import Path

from specctl.checkpoint import source_directory
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.digests import resolve_source as resolve_manifest_path
from specctl.contract.file_names import TOKENIZER

MANIFEST = "manifest.yaml"


def find_tokenizer(source: str | Path | None) -> Path:
    """Return the tokenizer.json that a source or the manifest in the working directory means.

    Raises:
        DiagnosticError: SD424 when there is none; SD119, SD120 for a source that is no directory,
            SD136 to SD147 for one on a hub;
            family 7 codes of an unreadable manifest.
    """
    if source is not None:
        path = Path(source).expanduser()
        directory = path.parent if path.is_file() else source_directory(source)
        name = path.name if path.is_file() else TOKENIZER
        return _existing(directory / name, f"--tokenizer {source}")
    manifest_path = Path(MANIFEST)
    if not manifest_path.is_file():
        raise DiagnosticError(
            diagnose(
                "SD424",
                where=f"{MANIFEST}#/target/source",
                message=f"no `--tokenizer` was given and there is no `{MANIFEST}` here",
                expected=f"`--tokenizer DIR`, or `{MANIFEST}` in the working directory",
                found="neither",
            )
        )
    manifest = load_manifest(manifest_path)
    directory = resolve_manifest_path(manifest.target.source, manifest_path.parent)
    return _existing(directory / TOKENIZER, f"{MANIFEST}#/target/source")


def _existing(path: Path, where: str) -> Path:
    if path.is_file():
        return path
    raise DiagnosticError(
        diagnose(
            "SD424",
            where=where,
            message=f"`{path.parent}` has no `{path.name}`",
            expected=path.name,
            found="no such file",
        )
    )
